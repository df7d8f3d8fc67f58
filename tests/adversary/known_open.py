"""Cases that do not hold and why: strict xfails, so that a mended one is noticed."""

KNOWN_OPEN: dict[str, str] = {
    "attention.encoder_in_bf16": "torch's fused layer in eval mode gives bf16, the stages fp32",
}
