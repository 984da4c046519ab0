"""The V2 model runner: the state of sequences lives on the device.

    request_states.py     sequences by slot, as far as the host knows them
    device_state.py       token ids, block tables and counts of each slot, on the device; the host's writes to them
    input_batch.py        the batch of one step, and the tensors that its inputs are built in
    forward.py            the layers of a rank, between its neighbour stages
    cuda_graphs.py        small steps as CUDA graphs; their sizes are in runner/graph_sizes.py
    sampling_metadata.py  sampling parameters of a batch, on the device
    device_sampler.py     sampling without the host
    verification.py       which drafts are right; recurrent states go on by these
    drafts.py             drafts of the model behind a step, a CUDA graph if the step only decodes
    async_output.py       sampled tokens on their way to the host
    grammar_masks.py      step part: masks of allowed tokens
    returned_tokens.py    step part: tokens from the last pipeline stage
    runner.py             composes them

Their Triton kernels are in runner/kernels/: step.py and sampling.py.

One step on the device's stream: copy staged writes · apply them · build inputs · forward pass (a graph if the step is
small) · logits · sample · store samples in the state · drafts of the model · copy tokens to the host on a side stream.
No part waits for the host, so the next step is launched while the tokens of this one are still being computed.
"""
