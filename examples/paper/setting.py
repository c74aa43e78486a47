"""Models, machines, SLOs and policies as Sarathi-Serve's evaluation has them (OSDI'24, section 5)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import sarathi_jax as sj
from sarathi_jax.cost_model import CostModel
from sarathi_jax.hardware import OSDI_ARTIFACT, find_device
from sarathi_jax.known_models import model_config
from sarathi_jax.pages import PagePool

SLOS = ("strict", "relaxed")


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A model where the paper ran it; `slo_s` and `budgets`: strict and relaxed. `overlap_chunks` as of the simulator.
    `artifact`: the constants fitted to the artifact's machine in place of the device's (in-sample, for it alone)."""

    model: str
    device: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    slo_s: tuple[float, float]
    budgets: tuple[int, int] = (512, 2048)
    orca_seqs: int
    artifact: bool = False
    overlap_chunks: bool = False

    @cached_property
    def cost(self) -> CostModel:
        device = find_device(self.device)
        return CostModel(
            model=model_config(self.model),
            device=replace(device, efficiency=OSDI_ARTIFACT) if self.artifact else device,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
        )

    def rule_s(self, slo: str) -> float:
        """The paper's rule: 5 x (strict) or 25 x (relaxed) a decode iteration of 32 at 4k, as predicted here."""
        return {"strict": 5, "relaxed": 25}[slo] * self.cost([4096] * 32, [])

    def policies(self, slo: str) -> dict[str, sj.SchedulerConfig]:
        return {
            "sarathi": sj.Sarathi(token_budget=self.budgets[SLOS.index(slo)], max_num_seqs=128),
            "vllm": sj.VLLM(max_num_seqs=128),
            "orca": sj.Orca(max_num_seqs=self.orca_seqs),
        }

    def simulator(self, policy: sj.SchedulerConfig, max_model_len: int) -> sj.Simulator:
        """On the pages that the weights, and the activations of the policy's largest iteration, leave."""
        tile = self.cost.device.token_tile
        tokens = policy.build(PagePool(max_model_len, 16), max_model_len=max_model_len, tile=tile).max_step_tokens
        num_pages = self.cost.kv_tokens(max_step_tokens=tokens, max_num_seqs=policy.max_num_seqs) // 16
        return sj.Simulator(
            policy, self.cost, num_pages=num_pages, page_size=16, max_model_len=max_model_len, tile=tile,
            overlap_chunks=self.overlap_chunks,
        )  # fmt: skip


MISTRAL = Serving(model="mistral-7b", device="a100", slo_s=(0.1, 0.5), orca_seqs=16)
YI = Serving(model="yi-34b-200k", device="a100-pairs", tensor_parallel=2, slo_s=(0.2, 1.0), orca_seqs=16)
YI_ARTIFACT = replace(YI, artifact=True)
LLAMA = Serving(
    model="llama2-70b", device="a40", tensor_parallel=4, pipeline_parallel=2, slo_s=(1.0, 5.0), budgets=(512, 1536),
    orca_seqs=8,
)  # fmt: skip
FALCON = Serving(
    model="falcon-180b", device="a100-pairs", tensor_parallel=4, pipeline_parallel=2, slo_s=(1.0, 5.0), orca_seqs=8
)
