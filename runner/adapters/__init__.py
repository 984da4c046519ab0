"""Adapters of requests (LoRA) beside the core: host copies, and the slots of sequences.

    load_adapter ─► HostAdapters: this rank's part of A and B, in host memory, read on any thread
    StepPlan     ─► AdapterSteps: host copies ─► slots on the device, slots of sequences ─► slots of tokens

The layers and the slots' memory: runner/models/adapters. Files and records: pdserve/adapters.
"""
