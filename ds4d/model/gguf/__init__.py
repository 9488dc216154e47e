"""Model files in GGUF version 3, arch `deepseek4` (spec/model.md 2): read, checked and written.

    container   bytes: values, the walk over a header, the layout of a new one
    schema      what the model needs of them: keys to and from `Geometry`, the tensor table
    reader      `open_model`: memory-mapped, everything checked before a tensor is touched
    writer      `write`: whole beside its name, synced, renamed

Knows no device and computes nothing; a tensor leaves here as its raw bytes.
"""

from ds4d.model.gguf.container import (
    Kind,
    TensorInfo,
    Typed,
    array,
    boolean,
    f32,
    string,
    u32,
)
from ds4d.model.gguf.reader import ModelFile, open_model
from ds4d.model.gguf.schema import (
    Defaults,
    ExpectedTensor,
    Vocabulary,
    expected_tensors,
    metadata_of,
)
from ds4d.model.gguf.writer import write, write_header

__all__ = [
    "Defaults",
    "ExpectedTensor",
    "Kind",
    "ModelFile",
    "TensorInfo",
    "Typed",
    "Vocabulary",
    "array",
    "boolean",
    "expected_tensors",
    "f32",
    "metadata_of",
    "open_model",
    "string",
    "u32",
    "write",
    "write_header",
]
