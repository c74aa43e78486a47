"""Tokenizers of Hugging Face folders: what their files say is merged, and a file that is wrong is named."""

import json

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from sarathi_jax.tokenizer import Tokenizer

from .test_tokenizer import HI, byte_letters


def save(folder, *, adds_bos: bool = True, **files) -> str:
    """A Hugging Face folder: tokenizer.json of 256 bytes, <s> 256, </s> 257, <eot> 258, and the JSON files given."""
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(byte_letters())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>", "<eot>")])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return str(folder)


BOS_EOS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}


def test_folder_eos_ids_are_merged_in_order(tmp_path):
    path = save(
        tmp_path,
        tokenizer_config=BOS_EOS,
        generation_config={"eos_token_id": [258, 257]},
        config={"eos_token_id": 3, "bos_token_id": 256},
    )
    t = Tokenizer.from_folder(path)
    assert t.eos_token_ids == (257, 258, 3)
    assert t.bos_token_id == 256
    assert t.decoder_kind == "byte_level"


def test_folder_of_only_a_tokenizer(tmp_path):
    t = Tokenizer.from_folder(save(tmp_path, adds_bos=False))
    assert (t.bos_token_id, t.eos_token_ids, t.add_bos, t.chat_template) == (None, (), False, None)
    assert t.vocab_size == 259


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("configured", [True, False, None])
def test_folder_add_bos(tmp_path, adds_bos, configured):
    config = BOS_EOS | ({} if configured is None else {"add_bos_token": configured})
    t = Tokenizer.from_folder(save(tmp_path, adds_bos=adds_bos, tokenizer_config=config))
    expected = adds_bos if configured is None else configured
    assert t.add_bos is expected
    assert t.encode("a") == ([256] if expected else []) + [97]


@pytest.mark.parametrize(
    "template",
    ["T {{ bos_token }}", [{"name": "default", "template": "T {{ bos_token }}"}, {"name": "rag", "template": "R"}]],
)
def test_folder_chat_template(tmp_path, template):
    path = save(tmp_path, tokenizer_config=BOS_EOS | {"chat_template": template})
    assert Tokenizer.from_folder(path).apply_chat_template(HI) == "T <s>"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert Tokenizer.from_folder(path).apply_chat_template(HI) == "file </s>"


def test_folder_errors_name_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(ValueError, match=r"generation_config\.json is not JSON"):
        Tokenizer.from_folder(save(tmp_path, generation_config="{"))
    with pytest.raises(ValueError, match=r"generation_config\.json must hold a JSON object"):
        Tokenizer.from_folder(save(tmp_path, generation_config=[]))
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(ValueError, match=r"eos_token='<end>' in .*tokenizer_config\.json"):
        Tokenizer.from_folder(save(tmp_path, tokenizer_config={"eos_token": "<end>"}))
    named = BOS_EOS | {"chat_template": [{"name": n, "template": n} for n in ("a", "b")]}
    with pytest.raises(ValueError, match="must be named 'default'"):
        Tokenizer.from_folder(save(tmp_path, tokenizer_config=named))


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        *[("tokenizer_config", "eos_token", value) for value in (["a"], 5, {"content": ["a"]})],
        *[("tokenizer_config", "bos_token", value) for value in (5, [1], True)],
        *[("tokenizer_config", "add_bos_token", value) for value in ("no", 1)],
        *[("tokenizer_config", "chat_template", value) for value in (5, {"default": "x"})],
        *[("generation_config", "eos_token_id", value) for value in ("a", 1.5, -1, ["a"], [[1]], [True], {})],
        *[("config", "eos_token_id", value) for value in ("a", 1.5, -1, ["a"])],
        *[("config", "bos_token_id", value) for value in ([0], "a", -1)],
    ],
)
def test_folder_values_of_a_wrong_type_are_named(tmp_path, file, key, value):
    with pytest.raises(ValueError, match=rf"^{key}=.* in .*{file}\.json must be"):
        Tokenizer.from_folder(save(tmp_path, **{file: {key: value}}))


@pytest.mark.parametrize("template", [[1, 2], [{"name": "default"}], [{"name": 1, "template": "x"}]])
def test_a_list_of_chat_templates_names_each(tmp_path, template):
    with pytest.raises(ValueError, match=r"chat_template in .*tokenizer_config\.json has .*'name' and 'template'"):
        Tokenizer.from_folder(save(tmp_path, tokenizer_config={"chat_template": template}))


def test_a_decoder_that_breaks_down_is_refused(tmp_path):
    """The library panics, with an exception that is no Exception: nothing that serves would catch it."""
    t = Tokenizer.from_folder(save(tmp_path))
    t.backend.decoder = decoders.Sequence([decoders.Strip("a", 3, 3), decoders.Fuse()])
    assert t.decode([98]) == "b"
    with pytest.raises(ValueError, match=r"decoder breaks down at ids \[97\]"):
        t.decode([97])
    t.backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer\.json: the tokenizer's decoder breaks down"):
        Tokenizer.from_folder(tmp_path)
