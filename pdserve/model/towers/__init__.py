"""Vision towers of multimodal checkpoints as config.json describes them; ../vision.py reads them."""
