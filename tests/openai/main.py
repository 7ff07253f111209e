"""Runs all checks against each arrangement of processes, and compares what the processes hold before and after."""

import sys
import time
import traceback

import openai

import checks
from processes import Cluster, differences, wait_until

ARRANGEMENTS = {"mono": Cluster.mono, "2p2d": Cluster.two_by_two}


def run(name):
    """The failures of one arrangement, as text."""
    print(f"\n{name}: starting", flush=True)
    failures = []
    cluster = ARRANGEMENTS[name]()
    try:
        with openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0, timeout=600) as client:
            context = checks.Context(cluster, client)
            # Connections that stay, and links between instances, are made by the first requests.
            # Which pair serves depends on the load, so a crowd may miss one.
            for _ in range(20):
                checks.crowd(context, chats=16, tokens=2)
                if cluster.is_linked():
                    break
            before = cluster.ledgers()
            for check in checks.ALL:
                started = time.monotonic()
                try:
                    check(context)
                    verdict = "ok"
                except Exception:  # noqa: BLE001 - every failure is a finding
                    verdict = "FAILED"
                    failures.append(f"{name}: {check.__name__}\n{traceback.format_exc()}")
                print(f"  {verdict:6} {time.monotonic() - started:6.1f} s  {check.__name__.replace('_', ' ')}", flush=True)
        found = []

        def clean():
            found[:] = differences(before, cluster.ledgers())
            return not found

        try:
            wait_until(clean, "nothing is left behind")
            print("  ok               ledgers as before")
        except AssertionError:
            print("  FAILED           ledgers as before")
            failures.append(f"{name}: ledgers differ\n" + "\n".join(found))
    finally:
        failures += [f"{name}: {end}" for end in cluster.stop()]
    return failures


def main():
    names = sys.argv[1:] or list(ARRANGEMENTS)
    if unknown := [name for name in names if name not in ARRANGEMENTS]:
        sys.exit(f"no such arrangement: {unknown[0]}; there are {', '.join(ARRANGEMENTS)}")
    failures = [failure for name in names for failure in run(name)]
    for failure in failures:
        print(f"\n{failure}", file=sys.stderr)
    print(f"\nopenai {openai.__version__}: {len(failures)} failures in {len(names) * len(checks.ALL)} checks")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
