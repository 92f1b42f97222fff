"""The ctypes declarations against csrc/c_api.h."""

from __future__ import annotations

import ctypes
import re
import subprocess

import pytest

from tfdist._src.native import api
from tfdist._src.native.compilation import SOURCE

HEADER = re.sub(r"/\*.*?\*/", "", (SOURCE / "c_api.h").read_text(), flags=re.DOTALL)
STRUCTURES = {
    "tfd_setup": api.Setup,
    "tfd_statistics": api.Statistics,
    "tfd_codec": api.Codec,
    "tfd_activity": api.Activity,
    "tfd_link": api.Link,
}
# C type -> the ctypes that may stand for it.
TYPES = {
    "void": None,
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_size_t,
    "const char*": ctypes.c_char_p,
    "const void*": ctypes.c_void_p,
    "void*": ctypes.c_void_p,
    "int64_t*": ctypes.POINTER(ctypes.c_int64),
    "const size_t*": ctypes.POINTER(ctypes.c_size_t),
    "const tfd_setup*": ctypes.POINTER(api.Setup),
    "tfd_statistics*": ctypes.POINTER(api.Statistics),
    "tfd_activity*": ctypes.POINTER(api.Activity),
    "tfd_link*": ctypes.POINTER(api.Link),
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    "uint32_t": ctypes.c_uint32,
    "const float*": ctypes.c_void_p,
    "float*": ctypes.c_void_p,
    "size_t*": ctypes.POINTER(ctypes.c_size_t),
    "const tfd_codec*": ctypes.POINTER(api.Codec),
    "uint64_t": ctypes.c_uint64,
    "const int*": ctypes.POINTER(ctypes.c_int),
    "const char* const*": ctypes.POINTER(ctypes.c_char_p),
}


def declarations():
    found = re.findall(r"^([\w ]+\*?) ?(tfd_\w+)\(((?:[^;])*)\);", HEADER, flags=re.MULTILINE)
    assert len(found) == HEADER.count(");")
    return {name: (result, arguments) for result, name, arguments in found}


def parameter(text):
    text = " ".join(text.split())
    if pointer := re.fullmatch(r"(.*\(\*)\w+(\).*)", text):
        return TYPES[pointer[1] + pointer[2]]
    return TYPES[re.sub(r"\s*\w+$", "", text)]


def test_every_function_is_declared():
    assert list(declarations()) == list(api.FUNCTIONS)


def test_declared_types_are_those_of_the_header():
    for name, (result, arguments) in declarations().items():
        texts = [] if arguments == "void" else re.split(r",(?![^(]*\))", arguments)
        declared = TYPES[result.strip()], tuple(parameter(text) for text in texts)
        assert api.FUNCTIONS[name] == declared, name


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_have_the_layout_of_the_compiler(name, tmp_path):
    """The compiler says where the fields are."""
    structure = STRUCTURES[name]
    body = re.search(rf"typedef struct \{{([^}}]*)\}} {name};", HEADER)
    assert body
    fields = re.findall(r"^ *(\S[^;]*?) (\w+);", body[1], flags=re.MULTILINE)
    assert [(name, TYPES[" ".join(text.split())]) for text, name in fields] == structure._fields_
    names = [field for _, field in fields]
    offsets = ", ".join(f"offsetof({name}, {field})" for field in names)
    (tmp_path / "offsets.cc").write_text(
        f'#include "c_api.h"\nextern "C" {{ extern const size_t values[]; }}\n'
        f"const size_t values[] = {{sizeof({name}), {offsets}}};\n"
    )
    library = tmp_path / "offsets.so"
    subprocess.run(
        ["c++", "-shared", "-fPIC", f"-I{SOURCE}", str(tmp_path / "offsets.cc"), "-o", library],
        check=True,
    )
    values = (ctypes.c_size_t * (len(names) + 1)).in_dll(ctypes.CDLL(str(library)), "values")
    expected = [ctypes.sizeof(structure), *(getattr(structure, field).offset for field in names)]
    assert list(values) == expected
