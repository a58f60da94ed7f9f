"""Moving KV blocks between two pools. Knows tensors, block ids and leases; no pool and no gRPC."""
