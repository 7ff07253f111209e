"""An engine of Mooncake that nobody here wrote, for interoperability tests. Speaks JSON lines with the test that started it."""

import ctypes
import json
import os
import sys
import time


def say(**what):
    print(json.dumps({"kvferry": what}), flush=True)


def hear():
    line = sys.stdin.readline()
    if not line:
        sys.exit("the test has ended")
    return json.loads(line)


def pattern(step, size):
    return bytes((i * step + 7) % 251 for i in range(size))


def main(role, size):
    import mooncake
    from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    memory = ctypes.create_string_buffer(size)
    address = ctypes.addressof(memory)
    assert engine.register_memory(address, size) == 0
    say(
        address=address,
        control=f"127.0.0.1:{engine.get_rpc_port()}",
        bench=os.path.join(os.path.dirname(mooncake.__file__), "transfer_engine_bench"),
    )
    if role == "target":
        heard = []
        end = time.monotonic() + 120
        while not heard and time.monotonic() < end:
            heard = engine.get_notifies()
            time.sleep(0.001)
        say(bytes=memory.raw.hex(), heard=[[note.name, note.msg] for note in heard])
        hear()
        return

    other = hear()
    peer, remote = other["peer"], other["address"]
    if role == "endless":
        while True:
            engine.transfer_sync_write(peer, address, remote, size)
    probe = engine.send_probe(peer)
    memory.raw = pattern(31, size)
    # Small and large pieces, in one batch.
    cuts = [0, 1, 2, 100, 1252, 70_000, size // 2, size]
    pieces = list(zip(cuts, cuts[1:]))
    note = TransferNotify("python", "with the data")
    wrote = engine.batch_transfer_sync(
        peer,
        [address + a for a, _ in pieces],
        [remote + a for a, _ in pieces],
        [b - a for a, b in pieces],
        TransferOpcode.Write,
        note,
    )
    rows = 1000
    memory.raw = bytes(size)
    step = size // rows
    read = engine.batch_transfer_sync_read(
        peer, [address + i * step for i in range(rows)], [remote + i * step for i in range(rows)], [step] * rows
    )
    bytes_read = memory.raw[: rows * step]
    outside = [
        engine.transfer_sync_write(peer, address, remote + at, length)
        for at, length in [(size, 1), (size - 1, 2), (-1, 2)]
    ]
    again = engine.transfer_sync_read(peer, address, remote, size)
    say(
        probe=probe,
        wrote=wrote,
        read=read,
        outside=outside,
        again=again,
        same=bytes_read == pattern(31, size)[: rows * step] and memory.raw == pattern(31, size),
    )


main(sys.argv[1], int(sys.argv[2]))
