"""Serves a package of ONNX stages over HTTP, several requests in one batch.

    gpipe-compile model.onnx --stages 2 && python examples/serve_onnx.py model_x2 8000
    curl --data-binary @x.npz localhost:8000 -o y.npz   # arrays, by the names of inputs and outputs

While the first stage is busy, requests wait, and are then put together along the batch; each goes
by itself where that fails. Under torchrun rank 0 serves, and the others run their stages.
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


class Server(ThreadingHTTPServer):
    def __init__(self, pipe, port):
        super().__init__(("localhost", port), Handler)
        self.pipe, self.waiting = pipe, queue.Queue()
        self.inputs = {item.name: item.batch_dim for item in pipe.spec.inputs}
        self.outputs = {item.name: item.batch_dim for item in pipe.spec.outputs}
        self.most = 1 if None in {*self.inputs.values(), *self.outputs.values()} else 32
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        while batch := [self.waiting.get()]:
            while len(batch) < self.most and not self.waiting.empty():
                batch.append(self.waiting.get())
            self.send(batch)

    def send(self, batch):
        try:
            (joined, *_), *more = batch
            if more:  # which raises where sizes differ
                parts = {name: [arrays[name] for arrays, *_ in batch] for name in self.inputs}
                joined = {n: np.concatenate(a, self.inputs[n]) for n, a in parts.items()}
            sent = self.pipe.submit(joined)  # waits until there is room
            sent.add_done_callback(lambda sent: self.answer(batch, sent.exception(), sent))
        except Exception as error:
            self.answer(batch, error, None)

    def answer(self, batch, error, sent):
        ends = np.cumsum([samples for _, samples, _ in batch])[:-1]
        for place, (arrays, samples, answer) in enumerate(batch):
            if error and len(batch) > 1:  # perhaps one alone spoils the batch
                self.send([(arrays, samples, answer)])
            elif error or len(batch) == 1:
                answer.set_exception(error) if error else answer.set_result(sent.result())
            else:
                found, dims = sent.result(), self.outputs
                answer.set_result({n: np.split(a, ends, dims[n])[place] for n, a in found.items()})


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        try:
            code, body, answer = 200, io.BytesIO(), Future()
            sent = self.rfile.read(int(self.headers["Content-Length"]))
            arrays = dict(np.load(io.BytesIO(sent)))
            self.server.waiting.put((arrays, self.server.pipe.samples(arrays), answer))
            np.savez(body, **answer.result())
        except Exception as error:
            code, body = 400, io.BytesIO(f"{error}\n".encode())
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body.getvalue())


if __name__ == "__main__":
    folder, port = Path(sys.argv[1]).resolve(), int(sys.argv[2])
    sys.path.insert(0, str(folder.parent))
    with importlib.import_module(folder.name).Pipeline() as pipe:
        pipe.serve() if pipe.rank else Server(pipe, port).serve_forever()
