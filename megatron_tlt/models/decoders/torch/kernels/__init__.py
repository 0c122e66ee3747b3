"""The Triton kernels of rollouts on CUDA, one file a purpose; nothing else imports triton."""
