def report(summary, *, title="Campaign"):
    return ""
