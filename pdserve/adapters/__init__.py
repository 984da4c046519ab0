"""LoRA adapters: files in PEFT's format, their content digests, and the records that nodes exchange. Never torch.

adapter.py         the records: Adapter, AdapterModule, AdapterSlot, AdapterLimits
peft_config.py     adapter_config.json: an allow-list of fields
base_layers.py     the linear layers of a base model that adapters may change, and their sizes
adapter_files.py   a directory ─► a checked Adapter
memory.py          the bytes of the slots on a device
"""
