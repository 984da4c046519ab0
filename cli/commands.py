"""The commands of ``pdserve``: a row names the module of a command, which is imported when it is called.

The module has ``make_parser()`` and ``main(argv)``, which returns the exit status. A new command is a module and a row.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from pdserve.flags.parser import CommandParser


class Command(NamedTuple):
    module: str
    summary: str  # line in ``pdserve --help``
    serves: bool = False  # runs until a signal, with settings from the environment


COMMANDS = {
    "up": Command("cli.up.command", "start prefill nodes, decode nodes and a router on this machine", serves=True),
    "prefill": Command("prefill_node.__main__", "start a prefill node", serves=True),
    "decode": Command("cli.decode", "start a decode node", serves=True),
    "serve": Command("cli.serve", "start a node that prefills and decodes", serves=True),
    "router": Command("router.__main__", "start a router", serves=True),
    "completion": Command("cli.completion", "print a completion script for a shell"),
    "doctor": Command("cli.doctor.command", "check whether a node with these flags would start and work here"),
    "bench": Command("cli.bench.command", "measure a running OpenAI-compatible server"),
    "chat": Command("cli.chat.command", "talk to a model in a terminal"),
    "explain": Command("cli.explain", "show the resolved configuration without loading weights"),
    "plan": Command("cli.plan.command", "compute how many prefill and decode nodes a workload needs"),
    "probe": Command("cli.probe", "check the health of a node: exit status 0 if healthy"),
    "lora": Command("cli.lora", "list, load and unload the LoRA adapters of running nodes"),
    "weights": Command("cli.weights", "show and change the weights of running nodes"),
    "key": Command("cli.key", "make an API key and its entry for `pdserve router --api-keys FILE`"),
}


def module_of(name: str) -> ModuleType:
    return import_module(COMMANDS[name].module)


def parser_of(name: str) -> CommandParser:
    parser: CommandParser = module_of(name).make_parser()
    return parser
