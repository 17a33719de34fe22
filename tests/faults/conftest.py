"""The fault kit: what can go wrong between a client and its service, and the required outcome.

    fault_server.py     a service on real sockets whose responses fail step by step, with a ledger of what
                        it really did; black holes, closed ports, TLS faults
    fault_proxy.py      a TCP proxy in front of a correct service: cuts, resets, delays, slices, lost headers
    virtual_time.py     event loops whose clock jumps, and a model of a service with workers and a queue
    kit.py              clients, the five calls, checks that nothing leaks and no secret is shown

    raising.py          raises an exception at any line of the package, as signal handlers do

    test_modes_*.py     44 ways in which such clients fail in production, by probability times damage; each
                        has a test named test_mode_NN_ and what it proves
    test_sweeps.py      a response cut at every byte, a call cancelled at every tick; `python test_sweeps.py`
                        makes all cuts
    conformance.json    faults x calls x required outcome, as data that clients in any language can run
    test_conformance.py runs it

The rule: a client may fail and may not know the outcome, but what it reports must be true. `Ledger.lies`
compares what was reported with what happened.

1 wire: test_modes_wire (1, 3, 6, 7, 8, 20, 21, 34, 35, 36), test_sweeps (2, 21)
2 load: test_modes_load (4, 5, 9, 15, 27, 29, 37, 38)
3 reading: test_modes_reading (10, 11, 12, 16, 17, 18, 19, 32, 33)
4 secrets and addresses: test_modes_security (22, 23, 24, 25, 26, 28, 31)
5 lifetimes: test_modes_lifetime (13, 14, 29, 30)
6 the host: test_modes_interruption (39), test_modes_host (40, 41, 42, 43, 44)
"""
