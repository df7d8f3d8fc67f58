"""Serves a package of ONNX stages over HTTP, several requests in one batch.

    gpipe-compile model.onnx --stages 2 && python examples/serve_onnx.py model_x2 8000
    curl --data-binary @x.npz localhost:8000 -o y.npz   # arrays, by the names of inputs and outputs

While the first stage is busy, requests wait, and are then put together along the batch. Where a
batch cannot be split, each goes by itself; the stages work on several at once all the same.
"""

import importlib
import io
import queue
import sys
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

MOST = 32
"""Requests in one batch."""


class Batcher:
    """Puts requests together, and hands its part of the outputs to each."""

    def __init__(self, pipe):
        self.pipe, self.waiting = pipe, queue.Queue()
        self.inputs = {item.name: item.batch_dim for item in pipe.spec.inputs}
        self.outputs = {item.name: item.batch_dim for item in pipe.spec.outputs}
        joins = None not in {*self.inputs.values(), *self.outputs.values()}
        self.most = MOST if joins else 1
        threading.Thread(target=self.work, daemon=True).start()

    def ask(self, arrays):
        """The outputs of one request; raises UsageError where it does not fit."""
        request = arrays, self.pipe.samples(arrays), Future()
        self.waiting.put(request)
        return request[2].result()

    def work(self):
        while batch := [self.waiting.get()]:
            while len(batch) < self.most and self.waiting.queue and self.fits(batch):
                batch.append(self.waiting.get())
            given = {name: [arrays[name] for arrays, _, _ in batch] for name in self.inputs}
            if len(batch) == 1:
                joined = batch[0][0]
            else:
                joined = {n: np.concatenate(a, self.inputs[n]) for n, a in given.items()}
            try:
                sent = self.pipe.submit(joined)  # waits until there is room
                sent.add_done_callback(lambda sent, batch=batch: self.answer(sent, batch))
            except Exception as error:
                for _, _, answer in batch:
                    answer.set_exception(error)

    def fits(self, batch):
        """Whether the next request is as large as the others but for the batch."""
        one, other = (
            [np.delete(arrays[name].shape, dim).tolist() for name, dim in self.inputs.items()]
            for arrays, _, _ in (batch[0], self.waiting.queue[0])
        )
        return one == other

    def answer(self, sent, batch):
        ends = np.cumsum([rows for _, rows, _ in batch])[:-1]
        for place, (_, _, answer) in enumerate(batch):
            if sent.exception():
                answer.set_exception(sent.exception())
            elif len(batch) == 1:
                answer.set_result(sent.result())
            else:
                outputs = {n: np.split(a, ends, self.outputs[n]) for n, a in sent.result().items()}
                answer.set_result({name: parts[place] for name, parts in outputs.items()})


class Handler(BaseHTTPRequestHandler):
    batcher: Batcher

    def do_POST(self):
        outputs, code = io.BytesIO(), 200
        try:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            np.savez(outputs, **self.batcher.ask(dict(np.load(io.BytesIO(data)))))
        except Exception as error:
            outputs, code = io.BytesIO(f"{error}\n".encode()), 400
        self.send_response(code)
        self.end_headers()
        self.wfile.write(outputs.getvalue())


if __name__ == "__main__":
    folder, port = Path(sys.argv[1]).resolve(), int(sys.argv[2])
    sys.path.insert(0, str(folder.parent))
    pipe = importlib.import_module(folder.name).Pipeline()
    pipe.warm_up()
    Handler.batcher = Batcher(pipe)
    ThreadingHTTPServer(("localhost", port), Handler).serve_forever()
