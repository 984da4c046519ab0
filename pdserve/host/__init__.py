"""The machine that a process runs on: CPUs, memory, containers, bytecode, parent and children."""
