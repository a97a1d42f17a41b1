"""`nouscoder model import`: a GGUF file becomes a Hugging Face folder, by transformers' own reader.

The weights are those of the file, with quantised ones multiplied out. The tokenizer, the chat template and the end
tokens are those that the file names. The reader takes any byte-level tokenizer for GPT-2's, also one that splits text
in a way that it does not know. Such a tokenizer would encode some texts wrongly, so it is refused here, unless this
module knows the way.

INVARIANT: the folder appears complete under its final name, and each weight of the architecture is from the file.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import whole_folder
from nouscoder.errors import Unusable
from nouscoder.input_file import regular
from nouscoder.installation import how_to_install
from nouscoder.policy_folder.pretrained import build_model, load_pretrained

_MAGIC = b"GGUF"
# Ways to split text before byte-level BPE (tokenizer.ggml.pre) that are GPT-2's own.
_AS_GPT2 = ("gpt-2", "default")


class GgufUnusable(Unusable):
    """A GGUF file cannot be imported. The message names the file and says why."""


def import_gguf(file: Path, out: Path, dtype: str = "bfloat16") -> int:
    """Make the folder `out` with weights of this type. Returns the number of weights. Raises GgufUnusable."""
    if find_spec("gguf") is None:
        raise GgufUnusable(f"{file} cannot be read: the package gguf is missing: {how_to_install('gguf')}")
    try:
        with regular(file).open("rb") as data:
            is_gguf = data.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise GgufUnusable(f"{file} cannot be read: {error.strerror}") from error
    if not is_gguf:
        raise GgufUnusable(f"{file} is no GGUF file: it does not begin with {_MAGIC.decode()}")
    if out.exists():
        raise GgufUnusable(f"{out} exists already: choose another folder")
    os.environ.setdefault("TQDM_DISABLE", "1")  # the reader shows progress bars
    try:
        tokenizer = _tokenizer(file)
        model = _model(file, dtype)
    except GgufUnusable:
        raise
    except Exception as error:  # the reader raises whatever a damaged or unknown file leads to
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        reason = reason[:200] if "not supported" in reason else f"it is cut or damaged ({reason[:200]})"
        raise GgufUnusable(f"{file} cannot be imported: {reason}") from error
    with whole_folder(out) as folder:
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return int(model.num_parameters())


def _tokenizer(file: Path) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, get_gguf_tokenizer

    _architecture, described, _settings = get_gguf_tokenizer(str(file))
    tokenizer = load_pretrained(AutoTokenizer, file.parent, gguf_file=file.name)
    way = described.get("pre_tokenizer_type")
    if described.get("tokenizer_type") != "gpt2" or way in _AS_GPT2 or way in GGUF_PRE_TOKENIZER_SPLITS:
        return tokenizer
    if way != "smollm":
        raise GgufUnusable(
            f"{file} cannot be imported: its tokenizer splits text in a way that is not known here"
            f" (tokenizer.ggml.pre {way}): take the model's own folder from a hub"
        )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def _model(file: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = load_pretrained(AutoConfig, file.parent, gguf_file=file.name)
    model = build_model(AutoModelForCausalLM, config, dtype=torch.float32)
    read: Any = load_gguf_checkpoint  # it has no types
    tensors = read(str(file), return_tensors=True, model_to_load=model)["tensors"]
    weights = model.state_dict()
    # Tied weights share their storage, and a file has them once.
    covered = {weights[name].data_ptr() for name in tensors if name in weights}
    missing = sorted(name for name, weight in weights.items() if weight.data_ptr() not in covered)
    if missing:
        raise GgufUnusable(f"{file} cannot be imported: it has no {missing[0]}")
    unknown = model.load_state_dict(tensors, strict=False).unexpected_keys
    if unknown:
        raise GgufUnusable(f"{file} cannot be imported: {unknown[0]} is no weight of a {config.model_type}")
    return model.to(getattr(torch, dtype))
