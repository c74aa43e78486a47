"""Published config.json files mean the published models: parameter counts, kinds of layers, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sarathi_jax.config import ModelConfig
from sarathi_jax.models.checkpoint import open_checkpoint
from sarathi_jax.models.families.registry import FAMILIES
from sarathi_jax.models.hf_config import model_config_from_hf
from sarathi_jax.models.weights import load_weights

GOLDEN = Path(__file__).parent.parent / "golden" / "tiny"


def sizes(vocab, hidden, inner, layers, heads, kv_heads, context, **more):
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": context, **more,
    }  # fmt: skip


FALCON_7B = {
    "model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "alibi": False,
    "num_attention_heads": 71, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True,
    "bias": False, "apply_residual_connection_post_layernorm": False, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
FALCON_40B = FALCON_7B | {
    "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8,
    "new_decoder_architecture": True,
}  # fmt: skip
OPT_125M = {
    "model_type": "opt", "vocab_size": 50272, "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "max_position_embeddings": 2048, "word_embed_proj_dim": 768,
    "do_layer_norm_before": True, "_remove_final_layer_norm": False, "activation_function": "relu",
}  # fmt: skip
PHI3_MINI = sizes(32064, 3072, 8192, 32, 32, 32, 4096, model_type="phi3", sliding_window=2047, attention_bias=False)
LONG = {"short_factor": [1.0] * 48, "long_factor": [4.0] * 48, "type": "su"}

# name: (config.json, parameters)
PUBLISHED = {
    "llama-2-7b": (sizes(32000, 4096, 11008, 32, 32, 32, 4096, model_type="llama"), 6_738_415_616),
    "mixtral-8x7b": (
        sizes(32000, 4096, 14336, 32, 32, 8, 32768, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2,
              sliding_window=None, rope_theta=1e6),
        46_702_792_704,
    ),
    "falcon-7b": (FALCON_7B, 6_921_720_704),
    "falcon-40b": (FALCON_40B, 41_303_293_952),
    "qwen2.5-0.5b": (
        sizes(151936, 896, 4864, 24, 14, 2, 32768, model_type="qwen2", tie_word_embeddings=True,
              use_sliding_window=False, sliding_window=32768, max_window_layers=24),
        494_032_768,
    ),
    "qwen3-30b-a3b": (
        sizes(151936, 2048, 6144, 48, 32, 4, 40960, model_type="qwen3_moe", head_dim=128, num_experts=128,
              num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
              mlp_only_layers=[], rope_theta=1e6, use_sliding_window=False, sliding_window=None, max_window_layers=48),
        30_532_122_624,
    ),
    "gemma-2-2b": (
        sizes(256000, 2304, 9216, 26, 8, 4, 8192, model_type="gemma2", head_dim=256, hidden_act="gelu_pytorch_tanh",
              hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, sliding_window=4096,
              attn_logit_softcapping=50.0, final_logit_softcapping=30.0, attention_bias=False),
        2_614_341_888,
    ),
    "gemma-3-1b": (
        sizes(262144, 1152, 6912, 26, 4, 1, 32768, model_type="gemma3_text", head_dim=256, sliding_window=512,
              sliding_window_pattern=6, rope_theta=1000000, rope_local_base_freq=10000, query_pre_attn_scalar=256,
              attn_logit_softcapping=None, final_logit_softcapping=None, rope_scaling=None),
        999_885_952,
    ),
    "phi-3-mini-4k": (PHI3_MINI, 3_821_079_552),
    "phi-4-mini": (
        sizes(200064, 3072, 8192, 32, 24, 8, 131072, model_type="phi3", partial_rotary_factor=0.75,
              tie_word_embeddings=True, original_max_position_embeddings=4096, sliding_window=262144,
              rope_scaling=LONG),
        3_836_021_760,
    ),
    "opt-125m": (OPT_125M, 125_239_296 - 2 * 768),  # without the two rows of positions for padding
    "smollm3-3b": (
        sizes(128256, 2048, 11008, 36, 16, 4, 65536, model_type="smollm3", tie_word_embeddings=True,
              no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9, use_sliding_window=False,
              sliding_window=None, layer_types=["full_attention"] * 36, rope_theta=5000000.0),
        3_075_098_624,
    ),
    "pythia-160m": (
        {"model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 768, "intermediate_size": 3072,
         "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 2048, "rotary_pct": 0.25,
         "rotary_emb_base": 10000, "use_parallel_residual": True, "hidden_act": "gelu", "tie_word_embeddings": False},
        162_322_944,
    ),
}  # fmt: skip


def config_of(name: str, **changes) -> ModelConfig:
    return model_config_from_hf(PUBLISHED[name][0] | changes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    assert config_of(name).num_params == PUBLISHED[name][1]


def test_falcons_differ_in_their_decoder():
    old, new = config_of("falcon-7b"), config_of("falcon-40b")
    assert (old.block, old.num_kv_heads, old.head_dim) == ("parallel_shared_norm", 1, 64)
    assert (new.block, new.num_kv_heads, new.head_dim) == ("parallel", 8, 64)
    assert model_config_from_hf(FALCON_40B | {"num_ln_in_parallel_attn": 1}).block == "parallel_shared_norm"
    sequential = model_config_from_hf(FALCON_7B | {"parallel_attn": False, "multi_query": False, "bias": True})
    assert (sequential.block, sequential.num_kv_heads) == ("sequential", 71)
    assert sequential.qkv_bias and sequential.o_bias and sequential.mlp_bias
    assert old.tie_embeddings and (old.norm, old.gated_mlp, old.hidden_act) == ("layer", False, "gelu")


def test_windows_of_each_layer():
    assert config_of("gemma-2-2b").layer_windows[:4] == (4096, None, 4096, None)
    assert config_of("gemma-3-1b").layer_windows == ((512,) * 5 + (None,)) * 4 + (512, 512)
    assert set(config_of("phi-3-mini-4k").layer_windows) == {2047}
    assert set(config_of("mixtral-8x7b").layer_windows) == {None}
    assert set(config_of("mixtral-8x7b", sliding_window=64).layer_windows) == {64}
    some = config_of("qwen2.5-0.5b", use_sliding_window=True, sliding_window=100, max_window_layers=21)
    assert some.layer_windows == (None,) * 21 + (100,) * 3
    types = ["full_attention"] + ["sliding_attention"] * 23
    assert config_of("qwen2.5-0.5b", use_sliding_window=True, layer_types=types).layer_windows[:2] == (None, 32768)
    assert config_of("gemma-3-1b", layer_types=["full_attention"] * 26).layer_windows == (None,) * 26
    unused = {"use_sliding_window": False, "sliding_window": 64}  # as some files have it
    for name in ("qwen2.5-0.5b", "qwen3-30b-a3b", "smollm3-3b"):
        assert set(config_of(name, **unused).layer_windows) == {None}
    assert set(config_of("qwen3-30b-a3b", use_sliding_window=True, sliding_window=64).layer_windows) == {64}


def test_gemmas():
    two, three = config_of("gemma-2-2b"), config_of("gemma-3-1b")
    assert (two.attention_soft_cap, two.logit_soft_cap, two.qk_norm) == (50.0, 30.0, False)
    assert (three.attention_soft_cap, three.logit_soft_cap, three.qk_norm) == (None, None, True)
    assert (two.embed_scale, two.query_scale, two.norm_offset, two.post_norms) == (48.0, 1 / 16, 1.0, True)
    assert (three.rope_theta, three.local_rope_theta) == (1e6, 1e4)
    assert [kind.rope for kind in three.layer_kinds[4:7]] == ["local", "main", "local"]
    scaled = config_of("gemma-3-1b", rope_scaling={"factor": 8.0, "rope_type": "linear"})
    assert (scaled.rope_scaling.kind, scaled.rope_scaling.factor) == ("linear", 8.0)
    assert config_of("gemma-2-2b", attn_logit_softcapping=None).attention_soft_cap is None


def test_layers_without_positions():
    config = config_of("smollm3-3b")
    assert [kind.rope for kind in config.layer_kinds[:5]] == ["main", "main", "main", None, "main"]
    del (absent := dict(PUBLISHED["smollm3-3b"][0]))["no_rope_layers"]
    assert model_config_from_hf(absent) == config
    windowed = config_of("smollm3-3b", layer_types=None, use_sliding_window=True, sliding_window=128)
    assert windowed.layer_windows[:4] == (None, None, None, 128)


def test_which_layers_have_experts():
    change = {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False}
    config = config_of("qwen3-30b-a3b", **change)
    assert [kind.moe for kind in config.layer_kinds[:6]] == [False, True, False, False, False, True]
    assert not config.norm_topk_prob and config.expert_size == 768
    dense = config_of("qwen3-30b-a3b", mlp_only_layers=list(range(48)))
    assert dense.num_experts == 0 and dense.intermediate_size == 6144
    assert config_of("mixtral-8x7b").norm_topk_prob


def test_partial_and_long_rotary_positions():
    config = config_of("phi-4-mini")
    assert (config.head_dim, config.rotary_dim, config.rope_scaling.kind) == (128, 96, "longrope")
    assert (config.rope_scaling.factor, config.rope_scaling.original_max_position) == (32.0, 4096)
    assert config_of("pythia-160m").rotary_dim == 16
    new = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    config = config_of("pythia-160m", rope_parameters=new)
    assert (config.rotary_dim, config.rope_theta) == (32, 500.0)
    assert config_of("pythia-160m", use_parallel_residual=False).block == "sequential"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (FALCON_7B | {"alibi": True}, "alibi=True.*ALiBi"),
        (FALCON_7B | {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        (FALCON_7B | {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        (OPT_125M | {"word_embed_proj_dim": 512}, "word_embed_proj_dim=512.*opt-350m"),
        (OPT_125M | {"do_layer_norm_before": False}, "do_layer_norm_before=False.*opt-350m"),
        (OPT_125M | {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        (OPT_125M | {"sliding_window": 64}, "sliding_window=64"),
        (PHI3_MINI | {"attention_bias": True}, "attention_bias"),
        (PHI3_MINI | {"rope_scaling": {"type": "su", "short_factor": [1.0] * 48}}, "long_factor"),
        (PHI3_MINI | {"rope_scaling": LONG | {"long_factor": [4.0] * 47}}, "long_factors has 47 factors; 48"),
        (PHI3_MINI | {"rope_scaling": LONG | {"long_factor": [0.0] * 48}}, r"long_factors=0\.0"),
        (PHI3_MINI | {"rope_scaling": LONG | {"long_mscale": 1.2}}, "long_mscale"),
        (PHI3_MINI | {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        (PUBLISHED["gemma-3-1b"][0] | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (PUBLISHED["gemma-3-1b"][0] | {"sliding_window": None}, "sliding_window is null"),
        (PUBLISHED["gemma-2-2b"][0] | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (PUBLISHED["gemma-3-1b"][0] | {"rope_parameters": {"full_attention": [1]}}, "flat object"),
        (
            PUBLISHED["gemma-3-1b"][0] | {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor=0.5",
        ),
        (
            PUBLISHED["gemma-3-1b"][0]
            | {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "scaled rotary positions in layers with a window",
        ),
        (FALCON_7B | {"head_dim": 32}, "head_dim=32"),
        (FALCON_7B | {"head_dim": "64"}, "head_dim='64'"),
        (PUBLISHED["smollm3-3b"][0] | {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        (PUBLISHED["smollm3-3b"][0] | {"num_hidden_layers": 0}, "num_hidden_layers=0"),
        (PUBLISHED["mixtral-8x7b"][0] | {"num_experts_per_tok": 9}, "experts_per_token"),
        (PUBLISHED["qwen3-30b-a3b"][0] | {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        (PUBLISHED["qwen3-30b-a3b"][0] | {"mlp_only_layers": 3}, "mlp_only_layers"),
        (PUBLISHED["pythia-160m"][0] | {"rotary_pct": 0.03}, "rotary_dim"),
        (PUBLISHED["llama-2-7b"][0] | {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers=2147483647.*from 1 to"),
        (PUBLISHED["llama-2-7b"][0] | {"per_layer_config": {"0": {"head_dim": 2}}}, "per_layer_config"),
        (PUBLISHED["llama-2-7b"][0] | {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(config, words):
    with pytest.raises(ValueError, match=words):
        model_config_from_hf(config)


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in GOLDEN.glob("*/config_v4.json")), ids=lambda p: p.name
)
def test_configs_of_transformers_4_and_5_mean_the_same(folder):
    old, new = (json.loads((folder / name).read_text()) for name in ("config_v4.json", "config.json"))
    assert model_config_from_hf(old) == model_config_from_hf(new)


# --------------------------------------------------------------------------------------------------------- tensor names


TINY = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))


@pytest.mark.parametrize("name", TINY)
def test_every_name_leads_to_its_tensor_and_back(name):
    hf_config = json.loads((GOLDEN / name / "config.json").read_text())
    family = FAMILIES[hf_config["model_type"]]
    names = family.names(model_config_from_hf(hf_config))
    index = GOLDEN / name / "model.safetensors.index.json"
    if index.exists():
        stored = set(json.loads(index.read_text())["weight_map"])
    else:
        with open(GOLDEN / name / "model.safetensors", "rb") as file:
            stored = set(json.loads(file.read(int.from_bytes(file.read(8), "little")))) - {"__metadata__"}
    for tensor in stored:
        for part in names.parts(tensor):
            assert names.stored(part.name) == tensor


def test_rows_of_fused_tensors_are_all_used_once():
    for name in ("falcon_40b", "gpt_neox", "phi3"):
        hf_config = json.loads((GOLDEN / name / "config.json").read_text())
        names = FAMILIES[hf_config["model_type"]].names(model_config_from_hf(hf_config))
        for target in names.layer.values():
            if not isinstance(target, str):
                rows = np.arange(target.num_rows)
                picked = [part.pick(rows) for part in target.parts.values()]
                assert [len(p) for p in picked] == [part.num_rows for part in target.parts.values()]
                assert sorted(np.concatenate(picked)) == rows.tolist()


# ------------------------------------------------------------------------------------------------------ spoiled folders


@pytest.fixture
def spoil(tmp_path):
    """A copy of a tiny model with `change` made to its tensors."""

    def spoil(name: str, change) -> Path:
        target = tmp_path / name
        shutil.copytree(GOLDEN / name, target)
        tensors = load_file(target / "model.safetensors")
        change(tensors)
        save_file(tensors, target / "model.safetensors")
        return target

    return spoil


QKV = "transformer.h.1.self_attention.query_key_value.weight"


def test_what_is_missing_or_not_understood_has_the_name_it_is_stored_under(spoil):
    def change(tensors):
        del tensors[QKV]
        tensors["transformer.h.1.mlp.gate.weight"] = np.zeros((3, 3), np.float32)

    words = rf"1 tensors missing: {QKV}; 1 tensors not understood: transformer\.h\.1\.mlp\.gate\.weight"
    with pytest.raises(ValueError, match=words):
        load_weights(open_checkpoint(spoil("falcon_7b", change)), np.float32)


def test_a_fused_tensor_of_another_size_is_refused_before_it_is_cut(spoil):
    rows = 4 * 12 + 2 * 12
    shorter = lambda tensors: tensors.update({QKV: tensors[QKV][:-1]})
    with pytest.raises(ValueError, match=rf"{QKV}' has shape \[{rows - 1}, 48\]; the config asks for {rows} rows"):
        open_checkpoint(spoil("falcon_7b", shorter))
    longer = lambda t: t.update({"model.decoder.embed_positions.weight": np.zeros((512, 48), np.float32)})
    with pytest.raises(ValueError, match=r"embed_positions\.weight' has shape \[512, 48\].*514 rows"):
        open_checkpoint(spoil("opt", longer))


def test_a_tensor_that_is_there_under_two_names_is_refused(spoil):
    twice = lambda tensors: tensors.update({"lm_head.weight": tensors["embed_out.weight"] * 2})
    with pytest.raises(ValueError, match=r"is 'lm_head\.weight', which the checkpoint has already"):
        open_checkpoint(spoil("gpt_neox", twice))


def test_buffers_of_old_checkpoints_are_left_out(spoil):
    def change(tensors):
        for name in ("bias", "masked_bias", "rotary_emb.inv_freq"):
            tensors[f"gpt_neox.layers.0.attention.{name}"] = np.zeros((1, 1), np.bool_)

    names = open_checkpoint(spoil("gpt_neox", change)).names
    assert names == open_checkpoint(GOLDEN / "gpt_neox").names


@pytest.mark.parametrize("missing", ["model-00003-of-00007.safetensors", "model-00007-of-00007.safetensors"])
def test_a_missing_shard_is_named(tmp_path, missing):
    target = tmp_path / "model"
    shutil.copytree(GOLDEN / "gemma2", target)
    (target / missing).unlink()
    with pytest.raises(ValueError, match=f"{missing} is named in .* but missing"):
        open_checkpoint(target)
