"""What the adapters of both TorchTitans share: which MoE layers dispatch their own tokens, and what is logged."""
