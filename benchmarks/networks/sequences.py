"""Networks for sequences: GNMT, an LSTM unrolled, the Transformer."""

from __future__ import annotations

from gpipe_compiler.graph_json.file import BareGraph
from networks.building import Network, Tensor


def gnmt(layers: int = 8, hidden: int = 1024, words: int = 50, batch: int = 64) -> BareGraph:
    """GNMT, a layer an op: bidirectional first layer, attention read by every decoder layer."""
    net = Network(f"gnmt_{layers}", batch)
    source, target = net.input(words), net.input(words)

    def embed(x: Tensor) -> Tensor:
        return net.op("embedding", [x], (words, hidden), parameters=32_000 * hidden)

    def lstm(x: Tensor) -> Tensor:
        weights = 4 * hidden * (x.shape[-1] + hidden)
        flops = 2.0 * weights * words * 2  # products of one word at a time run at half the speed
        out = net.op("lstm", [x], (words, hidden), flops=flops, parameters=weights)
        return net.op("getitem", [out], out.shape, free=True)

    x = embed(source)
    both = net.op("cat", [lstm(x), lstm(x)], (words, 2 * hidden))
    x = lstm(net.op("dropout", [both], both.shape))
    for _ in range(layers - 2):
        x = net.add(lstm(net.op("dropout", [x], x.shape)), x)
    keys = x
    y = lstm(embed(target))
    scores = net.op(
        "bmm", [net.linear(y, hidden), keys], (words, words), flops=2.0 * words**2 * hidden
    )
    weights = net.op("softmax", [scores], scores.shape)
    context = net.op("bmm", [weights, keys], (words, hidden), flops=2.0 * words**2 * hidden)
    for layer in range(layers - 1):
        joined = net.op("cat", [y, context], (words, 2 * hidden))
        z = lstm(net.op("dropout", [joined], joined.shape))
        y = net.add(z, y) if layer else z
    net.linear(y, 32_000)
    return net.graph()


def lstm_grid(layers: int = 8, words: int = 24, hidden: int = 1024, batch: int = 64) -> BareGraph:
    """An LSTM unrolled over layers and words; a layer's weights count with its first cell."""
    net = Network(f"lstm_{layers}x{words}", batch)
    row = [net.op("embedding", [net.input(1)], (hidden,), parameters=0) for _ in range(words)]
    for _ in range(layers):
        state: list[Tensor] = []
        for index, x in enumerate(row):
            weights = 8 * hidden * hidden
            inputs = [x, *state[-1:]]
            shape = (hidden,)
            flops = 4.0 * weights
            state.append(
                net.op("cell", inputs, shape, flops=flops, parameters=0 if index else weights)
            )
        row = state
    for x in row:
        net.linear(x, 8000)
    return net.graph()


def transformer(layers: int = 6, dim: int = 512, words: int = 128, batch: int = 32) -> BareGraph:
    """Transformer, encoder and decoder; all decoder layers read what the encoder gives."""
    net = Network(f"transformer_{layers}", batch)

    def attention(x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (net.view(net.linear(source, dim), words, dim) for source in (x, memory, memory))
        flops = 2.0 * words * words * dim
        scores = net.op("bmm", [q, k], (words, words * dim // 64), flops=flops)
        weights = net.op("dropout", [net.op("softmax", [scores], scores.shape)], scores.shape)
        y = net.view(net.op("bmm", [weights, v], (words, dim), flops=flops), words, dim)
        y = net.linear(y, dim)
        return norm(net.add(net.op("dropout", [y], y.shape), x))

    def norm(x: Tensor) -> Tensor:
        return net.op("norm", [x], x.shape, parameters=2 * dim)

    def feed(x: Tensor) -> Tensor:
        y = net.linear(net.relu(net.linear(x, 4 * dim)), dim)
        return norm(net.add(net.op("dropout", [y], y.shape), x))

    def embed() -> Tensor:
        words_in = net.input(words)
        x = net.op("embedding", [words_in], (words, dim), parameters=32_000 * dim)
        return net.op("dropout", [net.op("position", [x], x.shape)], x.shape)

    x = embed()
    for _ in range(layers):
        x = feed(attention(x, x))
    y = embed()
    for _ in range(layers):
        y = feed(attention(attention(y, y), x))
    net.linear(y, 32_000)
    return net.graph()
