"""The nvalchemi training strategy, executed by PyTorch Lightning."""
