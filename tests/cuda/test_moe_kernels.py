"""The kernels of the mixture of experts that are in the library are those that the build lists."""

from __future__ import annotations

import re

import capi
import moe_chains
import moe_kernels
import sass
from gpu import sanitize_moe

_BULK = "_bulk"


def _expected() -> dict[str, str]:
    """The expected kernels of all architectures that the library is for."""
    hopper = "90a-real" in sass.architectures()
    return {
        name: function
        for name, function in (moe_kernels.every() | moe_kernels.of_gradients()).items()
        if hopper or not ("_sm90_" in name or name.endswith(_BULK))
    }


def test_functions_are_those_of_the_list() -> None:
    expected = set(_expected().values())
    found = set()
    for line in sass.dump("-res-usage"):
        function = re.match(r"\s*Function (_Z\w+):", line)
        if function is not None:
            found.add(moe_kernels.function_of(moe_kernels.demangle(function[1])))
    assert found - {None} == expected


def test_names_are_those_of_the_list() -> None:
    expected = set(_expected())
    data = capi.library_path().read_bytes()
    kinds = (
        rb"moe_route_(?:once|choose|place|backward)\w*|moe_(?:up|down|combine)_\w+|grouped_product_sm\w+"
        rb"|moe_backward_(?:rows|combine|sums|zeros|slots|sm)\w*"
    )
    # Beginnings of names, which plans for models of GPUs look kernels up by, end in an underscore.
    found = {name.decode() for name in re.findall(rb"\0(" + kinds + rb")(?<!_)(?=\0)", data)}
    assert found == expected


def test_chains_are_made_of_all_of_them() -> None:
    """Those that GPU tests run: tests/gpu/test_moe_chains.py."""
    assert moe_chains.stated_kernels() == set(moe_kernels.every())


def test_sanitized_calls_are_made_of_all_of_them() -> None:
    """Those that compute-sanitizer watches: tests/gpu/sanitize_moe.py."""
    stated = set().union(*map(sanitize_moe.stated_kernels, sanitize_moe.PARTS))
    assert stated == set(moe_kernels.every())
