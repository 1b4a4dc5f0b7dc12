"""The Triton kernels. Importing a module here imports Triton; only tensors on a GPU lead here."""
