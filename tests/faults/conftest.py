"""The fault kit: what can go wrong between a client and its service, and what must come of it.

    fault_server.py     a service on real sockets whose answers are spoiled step by step, with a ledger of what
                        it really did; black holes, closed ports, faults of TLS
    fault_proxy.py      a TCP proxy in front of a right service: cut, reset, delayed, sliced, slow, headers lost
    virtual_time.py     event loops whose clock jumps, and a model of a service with workers and a queue
    kit.py              clients, the five calls, checks that nothing leaks and nothing secret is shown

    raising.py          an exception at any line of the package, as signal handlers raise them

    test_modes_*.py     44 ways in which such clients fail in production, by rank of chance times damage; each
                        has a test named test_mode_NN_ and the fact it proves
    test_sweeps.py      an answer cut at every byte, a call cancelled at every tick; `python test_sweeps.py`
                        makes all of the cuts
    conformance.json    faults x calls x what must come of it, as data that clients in any language can run
    test_conformance.py runs it

The rule of all of it: a client may fail and it may not know, but what it says must be true. `Ledger.lies`
compares what was said with what happened.

1 wire: test_modes_wire (1, 3, 6, 7, 8, 20, 21, 34, 35, 36), test_sweeps (2, 21)
2 load: test_modes_load (4, 5, 9, 15, 27, 29, 37, 38)
3 reading: test_modes_reading (10, 11, 12, 16, 17, 18, 19, 32, 33)
4 secrecy and ways: test_modes_security (22, 23, 24, 25, 26, 28, 31)
5 lifetimes: test_modes_lifetime (13, 14, 29, 30)
6 the host: test_modes_interruption (39), test_modes_host (40, 41, 42, 43, 44)
"""
