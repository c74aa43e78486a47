"""The decoder against Hugging Face transformers: tiny models of every variation, in chunks and whole."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sarathi_jax.config import ModelConfig
from sarathi_jax.models.checkpoint import open_checkpoint
from sarathi_jax.models.decoder import Decoder
from sarathi_jax.models.families.registry import FAMILIES
from sarathi_jax.models.weight_specs import weight_specs
from sarathi_jax.models.weights import init_weights, load_weights

GOLDEN = Path(__file__).parent.parent / "golden" / "tiny"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
FLOAT32 = jnp.dtype(jnp.float32)
HIDDEN, VOCAB_SIZE = 48, 96


def load(folder: Path) -> Decoder:
    checkpoint = open_checkpoint(folder)
    return Decoder(checkpoint.config, load_weights(checkpoint, FLOAT32))


def distance(logits: np.ndarray, golden: np.ndarray) -> float:
    """The worst row's error, relative to the row."""
    return float((np.linalg.norm(logits - golden, axis=-1) / np.linalg.norm(golden, axis=-1)).max())


def greedy(logits: np.ndarray, prompt_len: int) -> list[int]:
    return logits[prompt_len - 1 :].argmax(-1).tolist()


def test_the_variations_are_all_there():
    families = {json.loads((GOLDEN / name / "config.json").read_text())["model_type"] for name in NAMES}
    assert families == {*FAMILIES}
    assert {f"llama_{kind}" for kind in ("default", "linear", "dynamic", "llama3", "yarn", "tied", "bias")} <= {*NAMES}


@pytest.fixture(scope="module", params=NAMES)
def case(request, teacher_forcing):
    """A tiny model behind the driver."""
    folder = GOLDEN / request.param
    with np.load(folder / "golden.npz") as file:
        golden = {key: file[key] for key in file.files}
    driver = teacher_forcing(load(folder), row_counts=(320,), max_len=320, optimise=False)
    return request.param, driver, golden


@pytest.mark.parametrize("chunks", [(300,), (128, 64, 29)], ids=["whole", "chunks of 128, 64 and 29 side by side"])
def test_logits_and_greedy_tokens_are_those_of_transformers(case, forced, chunks):
    """At every position of the prompt; then greedy tokens, at once or one by one, on top of the pages before."""
    name, driver, golden = case
    for prefix in ("", "short_") if "short_logits" in golden else ("",):
        prompt, continuation = golden[f"{prefix}prompt_ids"], golden[f"{prefix}greedy_ids"].tolist()
        n = len(prompt)
        ids = [*prompt.tolist(), *continuation[:-1]]
        step = 1 if len(chunks) > 1 else len(continuation)
        runs = [forced(token_ids=ids, prompt_len=n, chunk=min(chunk, n), step=step) for chunk in chunks]
        for chunk, logits in zip(chunks, driver.logits(runs), strict=True):
            error = distance(logits[:n], golden[f"{prefix}logits"])
            assert error < 1e-4, f"{name}, {prefix}chunks of {chunk}: relative error {error:.1e}"
            assert golden[f"{prefix}gap"].min() > 0.01, "a golden file whose tokens are too close"
            if name != "llama_dynamic" or prefix == "short_":
                assert greedy(logits, n) == continuation, f"{name}, {prefix}chunks of {chunk}"


def test_dynamic_rotary_goes_by_the_length_of_the_prompt(teacher_forcing, forced):
    """The golden tokens come from whole passes, each with the base of its own length; a cached key keeps that of its
    time. So each prefix of the continuation is a prompt here, and the chunks it is cut into must not show."""
    golden = np.load(GOLDEN / "llama_dynamic" / "golden.npz")
    driver = teacher_forcing(load(GOLDEN / "llama_dynamic"), row_counts=(320,), max_len=320, optimise=False)
    ids, n = [*golden["prompt_ids"].tolist(), *golden["greedy_ids"].tolist()], len(golden["prompt_ids"])
    prompts = [ids[: n + i] for i in range(len(ids) - n)]
    tokens = []
    for i in range(0, len(prompts), 4):
        runs = [forced(token_ids=p, prompt_len=len(p), chunk=40 - j) for j, p in enumerate(prompts[i : i + 4])]
        tokens += [int(logits[-1].argmax()) for logits in driver.logits(runs)]
    assert tokens == golden["greedy_ids"].tolist()


def test_a_decode_repeats_what_a_longer_prompt_gives(teacher_forcing, forced):
    """Token by token from the first one on, next to a neighbour that is prefilled meanwhile (J12)."""
    golden = np.load(GOLDEN / "llama_default" / "golden.npz")
    ids = golden["prompt_ids"][:40].tolist()
    driver = teacher_forcing(load(GOLDEN / "llama_default"), row_counts=(16, 160), max_len=168, optimise=False)
    runs = [
        forced(token_ids=ids, prompt_len=1, chunk=1),
        forced(token_ids=ids, prompt_len=17, chunk=5),
        forced(token_ids=ids[::-1], prompt_len=40, chunk=9),
    ]
    one_by_one, mixed, other = driver.logits(runs)
    assert distance(one_by_one, golden["logits"][:40]) < 1e-4
    assert distance(mixed, golden["logits"][:40]) < 1e-4
    assert distance(other[:1], golden["logits"][:1]) > 1e-2, "a neighbour that is the same says nothing"


def test_one_changed_token_is_seen_from_there_on(teacher_forcing, forced):
    """Whichever chunk it is in (C11), and not before."""
    golden = np.load(GOLDEN / "llama_default" / "golden.npz")
    ids = golden["prompt_ids"][:48].tolist()
    driver = teacher_forcing(load(GOLDEN / "llama_default"), row_counts=(320,), max_len=320, optimise=False)
    for place in (3, 20, 47):
        changed = [*ids[:place], (ids[place] + 1) % VOCAB_SIZE, *ids[place + 1 :]]
        runs = [forced(token_ids=x, prompt_len=48, chunk=16) for x in (ids, changed)]
        before, after = driver.logits(runs)
        np.testing.assert_allclose(after[:place], before[:place], atol=1e-5)
        assert (np.linalg.norm(after[place:] - before[place:], axis=-1) > 1e-3).all()


# ------------------------------------------------------------------------------------------------------ loading weights


@pytest.fixture
def folder(tmp_path):
    """A copy of a tiny model to spoil: `edit(tensors, config)`, then load."""
    target = tmp_path / "model"
    shutil.copytree(GOLDEN / "llama_default", target)

    def edit(change=None, **config) -> Path:
        tensors = load_file(target / "model.safetensors")
        if change:
            change(tensors)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        path = target / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return target

    return edit


LAYER = "model.layers.1."


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(LAYER + "mlp.up_proj.weight"), ["1 tensors missing", LAYER + "mlp.up_proj.weight"]),
        (lambda t: t.pop("lm_head.weight"), ["1 tensors missing", "lm_head.weight"]),
        (
            lambda t: t.update({LAYER + "self_attn.q_proj.bias": np.zeros(64, np.float32)}),
            ["1 tensors not understood", LAYER + "self_attn.q_proj.bias"],
        ),
        (
            lambda t: t.update({LAYER + "mlp.down_proj.weight": np.zeros((HIDDEN, 41), np.float32)}),
            [LAYER + "mlp.down_proj.weight has shape (48, 41)", "(48, 40)"],
        ),
    ],
    ids=["missing layer weight", "missing head", "bias nobody asked for", "wrong shape"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(folder, change, words):
    """Never a model that is partly random."""
    path = folder(change)
    with pytest.raises(ValueError, match="does not fit its config") as error:
        load(path)
    for word in [*words, str(path)]:
        assert word in str(error.value)


def test_all_problems_are_listed_at_once(folder):
    def change(tensors):
        del tensors[LAYER + "mlp.up_proj.weight"]
        tensors["extra.weight"] = np.zeros(3, np.float32)
        tensors["model.norm.weight"] = np.zeros(HIDDEN + 1, np.float32)

    with pytest.raises(ValueError, match=r"missing.*up_proj.*not understood.*extra.*model\.norm\.weight has shape"):
        load(folder(change))


def test_a_layer_that_is_absent_is_missing_whole(folder):
    with pytest.raises(ValueError, match=r"9 tensors missing: model\.layers\.2\."):
        load(folder(num_hidden_layers=3))


def test_a_tied_model_that_also_stores_a_head_uses_the_embedding(folder, teacher_forcing, forced):
    """As transformers does (W02): the stored head is noise."""
    golden = np.load(GOLDEN / "llama_tied" / "golden.npz")
    target = folder()
    shutil.rmtree(target)
    shutil.copytree(GOLDEN / "llama_tied", target)
    ids = golden["prompt_ids"][:16].tolist()
    path = folder(lambda t: t.update({"lm_head.weight": np.full((VOCAB_SIZE, HIDDEN), 7, np.float32)}))
    driver = teacher_forcing(load(path), row_counts=(16,), max_len=16, optimise=False)
    (logits,) = driver.logits([forced(token_ids=ids, prompt_len=16, chunk=16)])
    assert distance(logits, golden["logits"][:16]) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_is_declared_as_the_checkpoint_has_it(name):
    checkpoint = open_checkpoint(GOLDEN / name)
    weights, specs = load_weights(checkpoint, FLOAT32), weight_specs(checkpoint.config)
    assert {k: w.shape for k, w in weights.items()} == {k: s.shape for k, s in specs.items()}
    assert sum(w.size for w in weights.values()) == checkpoint.config.num_params
    assert all(len(spec.axes) == len(spec.shape) for spec in specs.values())


def test_random_weights_have_the_declared_shapes_and_differ():
    config = ModelConfig(
        architecture="llama", vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, max_position=64, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True,
    )  # fmt: skip
    weights = init_weights(config, FLOAT32, seed=1)
    assert {k: w.shape for k, w in weights.items()} == {k: s.shape for k, s in weight_specs(config).items()}
    assert all(w.dtype == FLOAT32 for w in weights.values())
    assert sum(w.size for w in weights.values()) == config.num_params
    other = init_weights(config, FLOAT32, seed=2)
    assert all((np.asarray(weights[k]) != np.asarray(other[k])).any() for k in weights)
    assert abs(np.asarray(weights["layers0.attn_norm"]) - 1.0).max() < 0.2, "norms are about 1"


def test_no_weight_shares_a_buffer_with_another():
    """A tied head is the embedding itself, not a second leaf: one buffer twice could not be donated (J09)."""
    weights = load_weights(open_checkpoint(GOLDEN / "llama_tied"), FLOAT32)
    assert "head" not in weights
    pointers = [w.unsafe_buffer_pointer() for w in weights.values()]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_keep_the_dtype_asked_for(dtype):
    weights = load_weights(open_checkpoint(GOLDEN / "qwen3"), jnp.dtype(dtype))
    assert {str(w.dtype) for w in weights.values()} == {dtype}


class Counted:
    """A checkpoint that makes its tensors up as they are read."""

    source, eos_token_ids = "made up", ()

    def __init__(self, config: ModelConfig):
        self.config = config
        entries = ((spec, names) for spec in weight_specs(config).values() for _, names in spec.entries())
        self.shapes = {n: s for spec, names in entries for n, s in zip(names, spec.sources.values(), strict=True)}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def stored_name(self, name: str) -> str:
        return name

    def read(self, name: str) -> np.ndarray:
        return np.full(self.shapes[name], 0.5, np.float32)

    def tokenizer(self) -> None:
        return None

    def tokenizer_files(self) -> dict[str, bytes]:
        return {}


def test_loading_holds_one_weight_at_most_beside_the_model():
    """A model that just fits must also load."""
    config = ModelConfig(
        architecture="x", vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=12, num_heads=4,
        num_kv_heads=2, head_dim=64, max_position=64, num_experts=4, experts_per_token=2, expert_size=128,
        moe_pattern=(True, False),
    )  # fmt: skip
    checkpoint = Counted(config)
    load_weights(checkpoint, FLOAT32)  # what is made once
    tracemalloc.start()
    try:
        weights = load_weights(checkpoint, FLOAT32)
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    sizes = [weight.nbytes for weight in weights.values()]
    assert sum(sizes) > 4 * max(sizes), "a model with no weight that is most of it"
    assert peak < left + 2 * max(sizes), "one, and what is not yet let go of; left is shared with the devices"
