"""The V2 model runner: the state of sequences lives on the device.

    slots.py      which sequence has which row of the state, and what the host knows of it
    state.py      the state on the device, and how the host's differences get there in one copy
    inputs.py     the buffers a step's inputs are built in
    sampler.py    sampling without the host
    forward.py    the layers of a rank, between the stages beside it
    graphs.py     small steps as CUDA graphs
    pending.py    tokens on their way to the host
    runner.py     puts them together

Their Triton kernels are in runner/kernels/: step.py and sampling.py.

A step, on the device's stream: upload · apply writes · build inputs · forward (a graph where the step is small) ·
logits · sample · take samples in · copy tokens to the host on a side stream. Nothing in it waits for the host, so
the next step can be launched behind it while its tokens are still being computed.
"""
