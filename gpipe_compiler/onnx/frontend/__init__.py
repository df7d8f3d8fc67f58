"""ONNX models: read from their files, described, and made into a graph.

    model = read_model(path)                 # checked; large weights stay in their files
    shapes = describe(model, sizes)          # shape and type of every value
    graph = graph_of(model, ...)             # the ops and values that the passes see

Nodes are carried over as they are. Nothing is converted to torch: an op of the graph calls an
`OnnxNode`, which ONNX Runtime alone can run.
"""
