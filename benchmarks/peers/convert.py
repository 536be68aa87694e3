"""Turns a checkpoint into the GGUF files that llama.cpp reads, and proves that the experts are the same bits."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.package import WorkDir

Bytes = npt.NDArray[np.uint8]

# in GGUF: one scale byte, then 16 bytes whose low nibbles are values 0..15 and whose high nibbles are 16..31
BLOCK_VALUES, BLOCK_BYTES = 32, 17
EXPERT_PARTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


def convert(work: WorkDir, checkpoint: Path) -> None:
    """Write the bf16 file (dense weights as in the checkpoint) and from it the Q8_0 one; existing files are kept."""
    bf16, q8 = work.gguf(checkpoint, "bf16"), work.gguf(checkpoint, "q8")
    bf16.parent.mkdir(parents=True, exist_ok=True)
    if not bf16.exists():
        part = bf16.with_suffix(".part")
        wrapper = Path(__file__).parent / "convert_without_vocab.py"
        arguments = [str(work.tree), str(checkpoint), "--outtype", "bf16", "--outfile", str(part)]
        subprocess.run([sys.executable, str(wrapper), *arguments], check=True, stdout=sys.stderr)
        part.rename(bf16)
    if not q8.exists():
        part = q8.with_suffix(".part")
        arguments = [str(bf16), str(part), "MXFP4_MOE"]
        subprocess.run([str(work.bin / "llama-quantize"), *arguments], check=True, stdout=sys.stderr)
        part.rename(q8)
    for path in (bf16, q8):
        print(f"{path}: {verify_experts(work, checkpoint, path)} expert tensors are bit for bit the checkpoint's")


def verify_experts(work: WorkDir, checkpoint: Path, path: Path) -> int:
    """Compare every expert matrix of a GGUF file with the checkpoint's; the number of tensors (48 experts are one)."""
    tensors = _gguf_tensors(work, path)
    entries = _safetensors_entries(checkpoint)
    num_tensors = 0
    for name, tensor in tensors.items():
        _, _, rest = name.partition("blk.")
        layer, _, part = rest.removesuffix(".weight").partition(".")
        if part not in EXPERT_PARTS.values():
            continue
        assert tensor.tensor_type.name == "MXFP4", f"{name} is {tensor.tensor_type.name}"
        which = next(w for w, ours in EXPERT_PARTS.items() if ours == part)
        experts: Bytes = tensor.data.view(np.uint8)
        for expert, stored in enumerate(experts):
            stem = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{which}"
            packed, scale = entries[f"{stem}.weight_packed"], entries[f"{stem}.weight_scale"]
            assert np.array_equal(stored.reshape(-1, BLOCK_BYTES), _as_blocks(packed, scale)), f"{name}, {expert}"
        num_tensors += 1
    assert num_tensors > 0, f"{path} has no expert tensors"
    return num_tensors


def _as_blocks(packed: Bytes, scale: Bytes) -> Bytes:
    """The checkpoint's bytes (value 2i in the low nibble, 2i + 1 in the high one) in GGUF's order."""
    values = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1, BLOCK_VALUES)
    half = BLOCK_VALUES // 2
    return np.concatenate([scale.reshape(-1, 1), values[:, :half] | (values[:, half:] << 4)], axis=1)


def _gguf_tensors(work: WorkDir, path: Path) -> dict[str, Any]:
    folder = str(work.tree / "gguf-py")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    gguf: Any = __import__("gguf")
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def _safetensors_entries(checkpoint: Path) -> dict[str, Bytes]:
    """Every uint8 tensor of the checkpoint, memory-mapped."""
    entries: dict[str, Bytes] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        content = np.memmap(file, dtype=np.uint8, mode="r")
        start = 8 + int(content[:8].view(np.uint64)[0])
        for name, entry in json.loads(bytes(content[8:start])).items():
            if name != "__metadata__" and entry["dtype"] == "U8":
                first, end = entry["data_offsets"]
                entries[name] = content[start + first : start + end].reshape(entry["shape"])
    return entries
