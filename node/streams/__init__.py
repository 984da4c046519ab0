"""The serving end of long-lived gRPC streams, and the batches that they send."""
