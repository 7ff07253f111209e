"""Starts and ends the processes under test, and reads what they hold."""

import json
import os
import select
import signal
import subprocess
import time
import urllib.error
import urllib.request

BINARY = os.environ["KVFERRY_BIN"]
MODEL = os.environ.get("KVFERRY_MODEL", "smollm2")
START_SECONDS = 300
SETTLE_SECONDS = 60

# What only grows, and what a prefix cache keeps on purpose: its pages and states count as free where nobody holds them.
COUNTERS = {"completed", "failed", "landed", "refused", "tombstones", "pages_cached", "slots_cached"}
# Connections come and go with whoever asks, and threads of the runtime too: fewer than before is no leak, nor are a few more.
INEXACT = {"descriptors": 4, "sockets": 4, "threads": 2}


class Process:
    """One `kvferry serve`."""

    def __init__(self, role, *arguments):
        command = [BINARY, "serve", "--role", role, "--listen", "127.0.0.1:0", "--exit-with-parent", *arguments]
        # A client that leaves is worth a warning to an operator, but is on purpose here.
        environment = {"KVFERRY_LOG": "error", **os.environ}
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.role = role

    def wait_until_ready(self):
        readable, _, _ = select.select([self.child.stdout], [], [], START_SECONDS)
        line = self.child.stdout.readline() if readable else ""
        if not line:
            raise RuntimeError(f"the {self.role} process did not start; its standard error says why")
        ready = json.loads(line)
        self.url, self.instance = ready["http"], ready["instance"]
        return self

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)

    def ledger(self):
        return settled(self.get("/debug/ledger"))

    def stop(self):
        """Ends it as an operator would; the exit status."""
        self.child.send_signal(signal.SIGTERM)
        try:
            return self.child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.child.kill()
            return "killed: it did not end by itself"


def settled(value):
    """A ledger without what may differ when nothing is under way."""
    if not isinstance(value, dict):
        return value
    return {name: settled(part) for name, part in value.items() if name not in COUNTERS}


def differences(before, after, path=""):
    """What changed between two ledgers, as text."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for name in sorted(before.keys() | after.keys())
            for line in differences(before.get(name), after.get(name), f"{path}/{name}")
        ]
    slack = INEXACT.get(path.rsplit("/", 1)[-1])
    if before == after or (slack and after <= before + slack):
        return []
    return [f"{path}: {before} before, {after} after"]


class Cluster:
    """The processes of one arrangement. The first that is listed takes the requests."""

    def __init__(self, processes):
        self.processes = processes
        self.url = processes[0].url

    @classmethod
    def mono(cls):
        return cls([Process("mono", "--model", MODEL, "--layout", "tp=2").wait_until_ready()])

    @classmethod
    def two_by_two(cls):
        """Two prefill and two decode instances, no two of one layout, one of them with DCP."""
        registry = Process("registry").wait_until_ready()
        common = ["--registry", registry.url, "--model", MODEL]

        def start(role, name, layout):
            return Process(role, *common, "--instance", name, "--layout", layout)

        started = [
            start("prefill", "prefill-a", "tp=2,page=16"),
            start("prefill", "prefill-b", "tp=1,page=24"),
            start("decode", "decode-a", "tp=4,dcp=2,page=8"),
            start("decode", "decode-b", "tp=3,page=16"),
            Process("router", *common),
        ]
        instances = [process.wait_until_ready() for process in started]
        wait_until(lambda: is_ready(instances[-1]), "the router finds its instances")
        return cls([instances[-1], *instances[:-1], registry])

    def is_linked(self):
        """Whether every prefill instance has a link to every decode instance."""
        nodes = {name: ledger["node"] for name, ledger in self.ledgers().items() if "node" in ledger}
        decodes = sum(name.startswith("decode") for name in nodes)
        return all(node["links"] == decodes for name, node in nodes.items() if name.startswith("prefill"))

    def ledgers(self):
        return {process.instance: process.ledger() for process in self.processes}

    def stop(self):
        """What did not end well, as text."""
        ends = [(process.instance, process.stop()) for process in self.processes]
        return [f"{instance} ended with {status}" for instance, status in ends if status != 0]


def is_ready(process):
    try:
        return process.get("/ready").get("ready", False)
    except urllib.error.HTTPError:
        return False


def wait_until(condition, what, seconds=SETTLE_SECONDS):
    """Waits for a condition, not for a time."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s in vain: {what}")
        time.sleep(0.05)
    return found
