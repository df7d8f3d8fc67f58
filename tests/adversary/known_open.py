"""Cases that do not hold and why: strict xfails, so that a mended one is noticed."""

OUTPUTS = "a number of samples that is Python's own is that of a micro-batch"
CLASSES = "classes of the user's own come back as tuples and dicts"
TARGETS = "the batch dimension of a target is not found out where it is not that of the output"
PIECES = "compiled for one micro-batch, and runs in others without a word"

KNOWN_OPEN: dict[str, str] = {
    **dict.fromkeys(
        ("outputs.batch_size",),
        OUTPUTS,
    ),
    **dict.fromkeys(
        (
            "outputs.ordered_dict",
            "outputs.named_tuple",
            "outputs.named_tuple_inference",
            "outputs.dataclass",
            "outputs.dataclass_inference",
            "outputs.own_loss_in_a_dataclass",
            "llama.own_loss",
            "llama.own_loss_in_bf16",
            "llama.padded_example",
            "llama.hidden_states",
            "llama.inference",
            "llama.loss_of_logits",
            "llama.four_stages",
        ),
        CLASSES,
    ),
    "losses.ctc": "torch's CTC has no size before it has run",
    **dict.fromkeys(
        ("layouts.last_is_batch", "layouts.stays_folded", "layouts.transposed_out"), TARGETS
    ),
    **dict.fromkeys(("losses.root_in_one_piece",), PIECES),
    "attention.flex_inference": "traced with gradients, which flex_attention has none of on CPUs",
    "casts.own_autocast": "its 16-bit gradients are held to the tolerance of fp32",
    "attention.encoder_in_bf16": "torch's fused layer in eval mode gives bf16, the stages fp32",
}
