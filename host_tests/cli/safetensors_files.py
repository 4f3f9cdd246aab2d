"""Reads and writes safetensors files with the standard library, for tests that change golden files."""

import json
import struct

BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "I32": 4, "F32": 4, "I64": 8, "F64": 8}


class Tensor:
    def __init__(self, dtype, shape, data):
        self.dtype, self.shape, self.data = dtype, list(shape), bytes(data)

    def floats(self):
        """The numbers of an F32 or BF16 tensor."""
        if self.dtype == "F32":
            return list(struct.unpack("<%df" % (len(self.data) // 4), self.data))
        halves = struct.unpack("<%dH" % (len(self.data) // 2), self.data)
        return list(struct.unpack("<%df" % len(halves), struct.pack("<%dI" % len(halves), *(h << 16 for h in halves))))

    def as_i64(self):
        """An I32 tensor's numbers in twice the bytes."""
        numbers = memoryview(self.data).cast("i")
        return Tensor("I64", self.shape, b"".join(i.to_bytes(8, "little", signed=True) for i in numbers))

    def part(self, index):
        """The index-th entry along the first dimension."""
        size = len(self.data) // self.shape[0]
        return Tensor(self.dtype, self.shape[1:], self.data[index * size:(index + 1) * size])

    def turned(self):
        """[E, K, N] of [E, N, K]."""
        experts, outer, inner = self.shape
        numbers = memoryview(self.data).cast({2: "H", 4: "I"}[BYTES[self.dtype]])
        parts = [numbers[(expert * outer + row) * inner:(expert * outer + row + 1) * inner].tolist()
                 for expert in range(experts) for row in range(outer)]
        turned = [number for expert in range(experts)
                  for column in zip(*parts[expert * outer:(expert + 1) * outer]) for number in column]
        return Tensor(self.dtype, [experts, inner, outer],
                      struct.pack("<%d%s" % (len(turned), numbers.format), *turned))

    def rows(self, first, last):
        """Entries first..last-1 along the first dimension."""
        size = len(self.data) // self.shape[0]
        return Tensor(self.dtype, [last - first] + self.shape[1:], self.data[first * size:last * size])


def read(path):
    """(tensors by name, metadata)"""
    with open(path, "rb") as file:
        text = file.read()
    (length,) = struct.unpack("<Q", text[:8])
    header = json.loads(text[8:8 + length])
    metadata = header.pop("__metadata__", {})
    data = text[8 + length:]
    return {name: Tensor(row["dtype"], row["shape"], data[slice(*row["data_offsets"])])
            for name, row in header.items()}, metadata


def write(path, tensors, metadata=None):
    header, parts, offset = {}, [], 0
    if metadata:
        header["__metadata__"] = metadata
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape,
                        "data_offsets": [offset, offset + len(tensor.data)]}
        parts.append(tensor.data)
        offset += len(tensor.data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(parts))
