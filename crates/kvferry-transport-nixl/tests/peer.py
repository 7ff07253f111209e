"""A NIXL agent that nobody here wrote, for interoperability tests. Speaks JSON lines with the test that started it."""

import json
import os
import sys
import time

import numpy as np
from nixl_cu12._api import nixl_agent


def say(**what):
    print(json.dumps(what), flush=True)


def hear():
    return json.loads(sys.stdin.readline())


def until(what, found, limit=60.0):
    end = time.monotonic() + limit
    while not found():
        if time.monotonic() > end:
            sys.exit(f"no {what} within {limit} s")
        time.sleep(0.0005)


def main(role, size):
    agent = nixl_agent(f"python-{os.getpid()}")
    memory = np.zeros(size, dtype=np.uint8)
    address = memory.ctypes.data
    agent.register_memory([(address, size, 0, "")], "DRAM")
    say(metadata=agent.get_agent_metadata().hex(), address=address)
    other = hear()
    peer = agent.add_remote_agent(bytes.fromhex(other["metadata"]))
    if isinstance(peer, bytes):
        peer = peer.decode()
    heard = []

    def came(message):
        for messages in agent.get_new_notifs().values():
            heard.extend(messages)
        return message in heard

    if role == "initiator":
        memory[:] = (np.arange(size) * 31 + 7) % 251
        local = agent.get_xfer_descs([(address, size, 0)], "DRAM")
        remote = agent.get_xfer_descs([(other["address"], size, 0)], "DRAM")
        transfer = agent.initialize_xfer("WRITE", local, remote, peer, b"with the data")
        state = agent.transfer(transfer)

        def done():
            nonlocal state
            state = agent.check_xfer_state(transfer)
            assert state != "ERR", state
            return state == "DONE"

        until("end of the transfer", done)
        agent.release_xfer_handle(transfer)
        agent.send_notif(peer, b"by itself")
        until("answer", lambda: came(b"answer"))
    else:
        until("notification", lambda: came(b"written"))
        agent.send_notif(peer, b"seen")
    say(bytes=memory.tobytes().hex())
    sys.stdin.readline()


main(sys.argv[1], int(sys.argv[2]))
