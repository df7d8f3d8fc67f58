"""Cases that do not hold and why: strict xfails, so that a mended one is noticed."""

OUTPUTS = "what belongs to the batch as a whole is not put together rightly in infer mode"
CLASSES = "classes of the user's own come back as tuples and dicts"
ASKING = "inputs that ask for gradients get none"
TARGETS = "the batch dimension of a target is not found out where it is not that of the output"
PIECES = "compiled for one micro-batch, and runs in others without a word"

KNOWN_OPEN: dict[str, str] = {
    **dict.fromkeys(
        (
            "outputs.only_sum",
            "outputs.over_batch_sum",
            "outputs.over_batch_sum_of_columns",
            "outputs.over_batch_mean_of_columns",
            "outputs.over_batch_max",
            "outputs.over_batch_max_of_columns",
            "outputs.over_batch_min",
            "outputs.over_batch_any",
            "outputs.over_batch_count",
            "outputs.over_batch_gram",
            "outputs.sum_in_training",
            "outputs.max_in_training",
            "outputs.over_batch_norm",
            "outputs.over_batch_std",
            "outputs.over_batch_median",
            "outputs.batch_size",
        ),
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
    **dict.fromkeys(("inputs.asking", "inputs.asking_for_some"), ASKING),
    "losses.ctc": "torch's CTC has no size before it has run",
    **dict.fromkeys(
        ("layouts.last_is_batch", "layouts.stays_folded", "layouts.transposed_out"), TARGETS
    ),
    **dict.fromkeys(("outputs.over_batch_similarities", "losses.root_in_one_piece"), PIECES),
    "inputs.turns_on_the_input": "tracing refuses it",
    "inputs.floor_divided": "tracing refuses it",
    "attention.flex_inference": "traced with gradients, which flex_attention has none of on CPUs",
    "attention.encoder_in_bf16": "torch's fused layer in eval mode gives bf16, the stages fp32",
}
