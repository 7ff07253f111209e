"""Runs an engine of Mooncake for a process of kvferry, which starts it, tells it what to do, and ends it.

What is told and answered are JSON objects with one member, each in a packet of the socket that is standard input;
memory and long lists come as descriptors. What the objects are is in `packets.rs`.

Not for use by hand.
"""

import array
import ctypes
import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

VERSION = "0.3.13"
PACKAGES = ["mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"]
NAME = "kvferry"
# Of a packet.
LONGEST = 1 << 16
# Notifications in one packet, and bytes of one; longer ones are nobody's.
NOTES = 16
NOTE = 2048
# Between two looks at writes, in seconds.
LOOK = 0.0003
PR_SET_PDEATHSIG = 1
MAP_FIXED_NOREPLACE = 0x100000
MAP_FAILED = ctypes.c_void_p(-1).value
WORD = 8

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def map_at(address, length, protection, descriptor):
    """Maps memory at the address that it has for all processes of an instance."""
    flags = mmap.MAP_SHARED | MAP_FIXED_NOREPLACE
    mapped = libc.mmap(address, length, protection, flags, descriptor, 0)
    os.close(descriptor)
    if mapped in (None, MAP_FAILED) or mapped != address:
        raise OSError(ctypes.get_errno(), f"cannot map {length} bytes at {address:#x}")


def load():
    """The package, or why it is none that is known."""
    # Nothing is taken from the folder that kvferry was started in.
    sys.path[:] = [path for path in sys.path if path]
    from importlib import metadata

    import mooncake.engine

    for package in PACKAGES:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if version != VERSION and not version.startswith(VERSION + "."):
            raise ImportError(f"{package} is of version {version}, not {VERSION}")
        return mooncake.engine, f"{package} {version}"
    raise ImportError("the module `mooncake` is of another package")


class Sidecar:
    def __init__(self, control, module, package):
        self.control = control
        self.module = module
        self.engine = module.TransferEngine()
        # Takes requests of many descriptors, whose call spins until they are done.
        self.worker = ThreadPoolExecutor(max_workers=1)
        # Handles by the number of the write.
        self.moving = {}
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            sys.exit("the engine does not start")
        # Notifications ride on writes to and from here.
        self.scratch = mmap.mmap(-1, mmap.PAGESIZE)
        self.mailbox = ctypes.addressof(ctypes.c_char.from_buffer(self.scratch))
        if self.engine.register_memory(self.mailbox, mmap.PAGESIZE) != 0:
            sys.exit("the engine does not take its own memory")
        self.say("ready", port=self.engine.get_rpc_port(), mailbox=self.mailbox, package=package)

    def say(self, what, **details):
        self.control.send(json.dumps({what: details}).encode())

    def run(self):
        while True:
            if select.select([self.control], [], [], LOOK if self.moving else None)[0]:
                self.hear()
            self.look()

    def hear(self):
        packet, descriptors, _, _ = socket.recv_fds(self.control, LONGEST, 1)
        if not packet:
            # kvferry has ended, or wants no more of this.
            os._exit(0)
        [(what, details)] = json.loads(packet).items()
        getattr(self, what)(*descriptors, **details)

    def look(self):
        settled = []
        for number, handle in list(self.moving.items()):
            status = self.engine.transfer_check_status(handle)
            if status == 0:
                continue
            # It may not be asked of it again.
            del self.moving[number]
            if status == 1:
                settled.append(number)
            else:
                self.say("failed", id=number, reason=f"its status is {status}")
        if settled:
            self.say("settled", ids=settled)

    def memory(self, descriptor, address, length, open):
        map_at(address, length, mmap.PROT_READ | (mmap.PROT_WRITE if open else 0), descriptor)
        if open:
            if self.engine.register_memory(address, length) != 0:
                sys.exit(f"the engine does not take {length} bytes of memory")
            self.say("registered", address=address)

    def write(self, id, peer, source, target, length):
        handle = self.engine.transfer_submit_write(peer, source, target, length)
        if handle == 0:
            self.say("failed", id=id, reason="it was not taken")
        else:
            self.moving[id] = handle

    def batch(self, descriptor, id, peer, count):
        words = array.array("Q", os.pread(descriptor, 3 * count * WORD, 0))
        os.close(descriptor)
        lists = [words[at : at + count].tolist() for at in range(0, 3 * count, count)]

        def work():
            if self.engine.batch_transfer_sync_write(peer, *lists) == 0:
                self.say("settled", ids=[id])
            else:
                self.say("failed", id=id, reason="one of its descriptors was not written")

        self.worker.submit(work)

    def notify(self, peer, mailbox, message):
        note = self.module.TransferNotify(NAME, message)
        write = self.module.TransferOpcode.Write

        def work():
            status = self.engine.transfer_sync(peer, self.mailbox, mailbox, WORD, write, note)
            if status != 0:
                print(f"a notification was not taken: status {status}", file=sys.stderr, flush=True)

        # This call waits for the peer.
        threading.Thread(target=work, daemon=True).start()

    def listen(self):
        ours = [note.msg for note in self.engine.get_notifies() if note.name == NAME and len(note.msg) <= NOTE]
        for at in range(0, max(len(ours), 1), NOTES):
            self.say("heard", messages=ours[at : at + NOTES])


def main():
    # A kvferry that ends without a word closes the socket, too; this is for an engine that does not come back to it.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    control = socket.socket(fileno=0)
    try:
        module, package = load()
    except Exception as error:
        control.send(json.dumps({"missing": {"reason": f"{sys.executable}: {error}"}}).encode())
        sys.exit(1)
    Sidecar(control, module, package).run()


main()
