"""Kernels of Hopper never overwrite registers of products that are still computed, as the compiled code shows.

Triton before 3.9 does so without ``WAITS`` (triton-lang/triton#9433): on an H200 some products were NaN.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sass import find_overwritten

from runner.kernels.experts.grouped_mxfp4 import overwrites_operands

TESTS = Path(__file__).parents[1]
LOOP = """
        /*0100*/                   LDSM.16.M88.4 {loaded}, [R90] ;
        /*0110*/                   HGMMA.64x128x16.F32.BF16 R24, R8, gdesc[UR8], R24 ;
        /*0120*/                   HGMMA.64x128x16.F32.BF16 R24, R12, gdesc[UR8], R24, gsb0 ;
        /*0130*/                   WARPGROUP.DEPBAR.LE gsb0, {newest} ;
        /*0140*/               @P0 BRA 0x100 ;
"""


@pytest.mark.parametrize(
    ("loaded", "newest", "written"),
    [
        ("R8", "0x0", []),
        ("R8", "0x1", ["R8"]),  # the wait leaves the newest group in flight, which reads R8
        ("R10", "0x1", ["R8", "R12"]),
        ("R4", "0x1", []),
    ],
)
def test_writes_before_the_wait_are_found(loaded: str, newest: str, written: list[str]) -> None:
    hits = find_overwritten(LOOP.format(loaded=loaded, newest=newest))
    assert [hit.product.text.split(", ")[1] for hit in hits] == written


def test_triton_that_overwrites_operands_is_known_by_version() -> None:
    assert overwrites_operands((9, 0), "3.6.0")
    assert not overwrites_operands((9, 0), "3.9.0")
    assert not overwrites_operands((8, 0), "3.6.0")  # no HGMMA


def compiled(kernels: list[str]) -> list[dict[str, Any]]:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(TESTS / "support" / "compiled_kernels.py"), *kernels]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=TESTS.parent, check=False)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result["kernel"] for result in results] == kernels
    return results


def check(kernels: list[str]) -> None:
    results = compiled(kernels)
    assert all(result["products"] for result in results), "the kernel has products with registers"
    assert [result for result in results if result["overwritten"]] == []


@pytest.mark.slow
def test_mxfp4_products_keep_their_operands() -> None:
    check(["gated:16"])


@pytest.mark.slow
def test_kernels_of_gated_delta_nets_compile_for_hopper() -> None:
    """The interpreter accepts more than the compiler. Two kernels spill: with fewer registers they are faster."""
    names = ["decodes", "prompts", "history", "rule", "commit", "invert", "advance", "short", "norm", "sigmoid"]
    results = compiled([f"delta:{name}" for name in names])
    assert [result for result in results if result["overwritten"]] == []
    assert {result["kernel"] for result in results if result["spilled"]} <= {"delta:prompts", "delta:invert"}


@pytest.mark.slow
def test_kernels_of_latent_attention_compile_for_hopper() -> None:
    results = compiled([f"latent:{name}" for name in ("store", "gather", "decode", "several", "prefill")])
    assert [result for result in results if result["overwritten"]] == []


@pytest.mark.slow
def test_all_products_keep_their_operands() -> None:
    check([f"{kind}:{rows}" for kind in ("gated", "plain") for rows in (16, 32, 64, 128)])
    check(["attention:0", "attention:128"])


@pytest.mark.slow
def test_products_of_four_bit_weights_keep_their_operands() -> None:
    """Few rows are multiplied without registers that a product may still read."""
    forms = ("nvfp4", "mxfp4", "awq", "int4", "channel")
    kernels = [f"four_bits:{form}:{rows}" for form in forms for rows in (1, 32, 64, 256)]
    kernels += [f"four_bit_experts:{form}:{rows}" for form in ("nvfp4", "awq") for rows in (0, 8, 64, 128)]
    results = compiled(kernels)
    assert [result for result in results if result["overwritten"] or result["spilled"]] == []
