"""bindings/xla_ffi_abi.h against the headers that jaxlib ships."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")

ROOT = Path(__file__).resolve().parents[2]

# ours, XLA's, and pairs of fields; a field pair is compared in offset and in size.
STRUCTS = {
    "Extension": ("XLA_FFI_Extension_Base", "struct_size type next"),
    "ApiVersion": (
        "XLA_FFI_Api_Version",
        "struct_size extensions=extension_start major=major_version minor=minor_version",
    ),
    "Buffer": ("XLA_FFI_Buffer", "struct_size dtype data rank dims"),
    "Text": ("XLA_FFI_ByteSpan", "data=ptr size=len"),
    "Scalar": ("XLA_FFI_Scalar", "dtype value"),
    "Attributes": ("XLA_FFI_Attrs", "struct_size size types names values=attrs"),
    "CreateErrorArguments": ("XLA_FFI_Error_Create_Args", "struct_size message code=errc"),
    "DestroyErrorArguments": ("XLA_FFI_Error_Destroy_Args", "struct_size error"),
    "GetStreamArguments": ("XLA_FFI_Stream_Get_Args", "struct_size context=ctx stream"),
    "AllocateArguments": (
        "XLA_FFI_DeviceMemory_Allocate_Args",
        "struct_size context=ctx size alignment data",
    ),
    "FreeArguments": ("XLA_FFI_DeviceMemory_Free_Args", "struct_size context=ctx size data"),
    "GetDeviceOrdinalArguments": (
        "XLA_FFI_DeviceOrdinal_Get_Args",
        "struct_size context=ctx device_ordinal",
    ),
    "Api": (
        "XLA_FFI_Api",
        "struct_size version=api_version internal_api create_error=XLA_FFI_Error_Create "
        "destroy_error=XLA_FFI_Error_Destroy get_stream=XLA_FFI_Stream_Get "
        "allocate=XLA_FFI_DeviceMemory_Allocate free=XLA_FFI_DeviceMemory_Free "
        "get_device_ordinal=XLA_FFI_DeviceOrdinal_Get",
    ),
    "CallFrame": (
        "XLA_FFI_CallFrame",
        "struct_size extensions=extension_start api context=ctx stage arguments=args results=rets "
        "attributes=attrs",
    ),
    "Metadata": ("XLA_FFI_Metadata", "struct_size api_version traits"),
    "MetadataExtension": ("XLA_FFI_Metadata_Extension", "extension=extension_base metadata"),
}
VALUES = {
    "kMetadataExtension": "XLA_FFI_Extension_Metadata",
    "kInvalidArgument": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "kResourceExhausted": "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED",
    "kFailedPrecondition": "XLA_FFI_Error_Code_FAILED_PRECONDITION",
    "kUnimplemented": "XLA_FFI_Error_Code_UNIMPLEMENTED",
    "kInternal": "XLA_FFI_Error_Code_INTERNAL",
    "kInt32": "XLA_FFI_DataType_S32",
    "kInt64": "XLA_FFI_DataType_S64",
    "kFloat16": "XLA_FFI_DataType_F16",
    "kFloat32": "XLA_FFI_DataType_F32",
    "kFloat64": "XLA_FFI_DataType_F64",
    "kBFloat16": "XLA_FFI_DataType_BF16",
    "kBufferArgument": "XLA_FFI_ArgType_BUFFER",
    "kScalarAttribute": "XLA_FFI_AttrType_SCALAR",
    "kStringAttribute": "XLA_FFI_AttrType_STRING",
    "kCommandBufferCompatible": "XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE",
}


RENAMED = {"XLA_FFI_Extension_Base": "XLA_FFI_InternalExtension"}  # in version 0.5
# A version-0.1 runtime may end its table before this function; the handler looks before it calls.
LATER = "XLA_FFI_DeviceOrdinal_Get"


def program(header: str) -> str:
    lines = ['#include "bindings/xla_ffi_abi.h"', '#include "xla/ffi/api/c_api.h"']
    lines.append("namespace x = flashmoe::xla;")
    structs = {**STRUCTS, "Values": ("XLA_FFI_Args", "struct_size size types values=args")}
    for ours, (theirs, fields) in structs.items():
        for pair in fields.split():
            a, _, b = pair.partition("=")
            b = b or a
            lines.append(f"static_assert(offsetof(x::{ours}, {a}) == offsetof({theirs}, {b}));")
            lines.append(f"static_assert(sizeof(x::{ours}::{a}) == sizeof({theirs}::{b}));")
    lines.append("static_assert(sizeof(x::Values) == sizeof(XLA_FFI_Rets));")
    lines.append("static_assert(offsetof(x::Values, values) == offsetof(XLA_FFI_Rets, rets));")
    lines += [f"static_assert(int(x::{ours}) == int({xla}));" for ours, xla in VALUES.items()]
    lines.append("static_assert(x::kApiMajor == XLA_FFI_API_MAJOR);")
    lines.append("static_assert(x::kApiMinor <= XLA_FFI_API_MINOR);")
    for old, new in RENAMED.items():
        if old not in header:
            lines = [line.replace(old, new) for line in lines]
    if LATER not in header:
        lines = [line for line in lines if LATER not in line]
    return "\n".join(lines) + "\n"


def test_layouts_and_numbers_are_xlas(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source = tmp_path / "abi.cpp"
    header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    source.write_text(program(header))
    command = [compiler, "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof"]
    command += [f"-I{ROOT}", f"-I{jax.ffi.include_dir()}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
