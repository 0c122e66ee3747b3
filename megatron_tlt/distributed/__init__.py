"""The world: MPI launch, torch.distributed groups, rank grid."""
