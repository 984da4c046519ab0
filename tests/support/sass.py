"""Reads SASS, the machine code of NVIDIA GPUs, for products whose registers are overwritten too early.

On Hopper, HGMMA multiplies while the program goes on. Its left operand may be in registers, which keep their values
until ``WARPGROUP.DEPBAR.LE gsb0, N`` has waited for the product's group: all groups but the N newest.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;")
_PREDICATE = re.compile(r"^@!?U?P\d+ ")
_BRANCH = re.compile(r"BRA(?:\.\S+)?\s+(?:\S+, )?0x([0-9a-f]+)")
_PRODUCT = re.compile(r"HGMMA\S* R\d+, R(\d+), gdesc")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
_WRITE = re.compile(r"(\S+) (?:P\d, )?R(\d+)(?:\.\w+)?(?:,|$)")
_NO_WRITE = ("ST", "LDGSTS", "BRA", "RED", "WARP", "HGMMA")
_LEFT_REGISTERS = 4  # registers of the left operand of 16-bit numbers


class Instruction(NamedTuple):
    address: int
    text: str  # without its predicate


class Overwritten(NamedTuple):
    """A register of a product that may still be read, and the instruction that writes it."""

    product: Instruction
    write: Instruction


def instructions(sass: str) -> list[Instruction]:
    return [Instruction(int(at, 16), _PREDICATE.sub("", text)) for at, text in _INSTRUCTION.findall(sass)]


def count_register_products(sass: str) -> int:
    return sum(bool(_PRODUCT.match(instruction.text)) for instruction in instructions(sass))


def count_spills(sass: str) -> int:
    """Return the number of reads and writes of memory that holds values for which there are no registers."""
    return sum(instruction.text.startswith(("LDL", "STL")) for instruction in instructions(sass))


def find_overwritten(sass: str) -> list[Overwritten]:
    """Return the first write to each product's left operand before its wait, within loops and across their ends."""
    code = instructions(sass)
    index = {instruction.address: at for at, instruction in enumerate(code)}
    overwritten = list[Overwritten]()
    for end, last in enumerate(code):
        branch = _BRANCH.match(last.text)
        if branch and int(branch[1], 16) < last.address:
            body = code[index[int(branch[1], 16)] : end + 1]
            products = (at for at, instruction in enumerate(body) if _PRODUCT.match(instruction.text))
            overwritten += [hit for at in products if (hit := _first_write(body + body, at))]
    return overwritten


def _first_write(code: list[Instruction], product: int) -> Overwritten | None:
    match = _PRODUCT.match(code[product].text)
    assert match
    left = range(int(match[1]), int(match[1]) + _LEFT_REGISTERS)
    newer = None if "gsb0" not in code[product].text else 0  # groups after the product's own, once that is complete
    for instruction in code[product + 1 :]:
        text = instruction.text
        if text.startswith("HGMMA"):
            if "gsb0" in text:
                newer = 0 if newer is None else newer + 1
        elif wait := _WAIT.match(text):
            if newer is not None and int(wait[1], 16) <= newer:
                return None
        elif not text.startswith(_NO_WRITE) and (write := _WRITE.match(text)):
            first = int(write[2])
            if first < left.stop and first + _width(write[1]) > left.start:
                return Overwritten(code[product], instruction)
    return None


def _width(opcode: str) -> int:
    """Return how many registers an instruction writes."""
    return 4 if ".M88.4" in opcode or ".128" in opcode else 2 if ".64" in opcode or "WIDE" in opcode else 1
