"""Cases that do not hold and why: strict xfails, so that a mended one is noticed."""

KNOWN_OPEN: dict[str, str] = {
    "control.cond_of_layers": "of the way that torch.cond does not take, stages know no weights: "
    "their gradients are missing, where plain PyTorch has zeros",
}
