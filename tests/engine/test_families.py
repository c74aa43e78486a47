"""Families of models through the whole engine: in chunks, in pages, with decodes, the tokens are transformers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import sarathi_jax as sj
from sarathi_jax.models.checkpoint import open_checkpoint
from sarathi_jax.models.decoder import Decoder
from sarathi_jax.models.weights import load_weights

TINY = Path(__file__).parent.parent / "golden" / "tiny"


@pytest.mark.parametrize("name", ["mixtral", "gemma3"])
def test_an_engine_generates_what_transformers_does(name, assert_idle):
    """Experts, and alternating windows with post norms; a short prompt runs beside the golden one."""
    golden = np.load(TINY / name / "golden.npz")
    checkpoint = open_checkpoint(TINY / name)
    model = Decoder(checkpoint.config, load_weights(checkpoint, "float32"))
    engine = sj.Engine(model, None, scheduler=sj.Sarathi(token_budget=32, max_num_seqs=2), max_model_len=320)
    llm = sj.LLM(engine)
    params = sj.SamplingParams(temperature=0, max_tokens=len(golden["greedy_ids"]), ignore_eos=True)
    prompts = [golden["prompt_ids"], golden["prompt_ids"][:5]]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    assert outputs[0].token_ids == golden["greedy_ids"].tolist()
    assert_idle(engine)
