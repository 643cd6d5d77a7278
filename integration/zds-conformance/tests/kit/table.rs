//! The faults of the reference ztunnel and of the broken agent, and the cases that must catch the faults.

/// The fault, the case that must fail, and a text in the evidence of the case.
pub(crate) type Row = (&'static str, &'static str, &'static str);

pub(crate) const OF_A_ZTUNNEL: &[Row] = &[
    ("silent", "hello-first", "the hello 08 01 first"),
    ("wrong-version", "hello-first", "(08 02)"),
    (
        "keepalive",
        "hello-first",
        "not a word that was not asked for",
    ),
    (
        "gives-up-early",
        "agent-starts-later",
        "no connection: the process ended",
    ),
    (
        "no-reconnect",
        "reconnects-after-close",
        "a connection within",
    ),
    ("impatient", "slow-agent", "the end of the connection"),
    (
        "ack-twice",
        "one-answer-per-request",
        "not a word that was not asked for",
    ),
    (
        "never-ack",
        "one-answer-per-request",
        "one answer to Keep unknown",
    ),
    (
        "swallow-one-ack",
        "one-answer-per-request",
        "one answer to Del unknown",
    ),
    (
        "acks-out-of-order",
        "answers-in-order",
        "the second of three",
    ),
    (
        "small-buffer",
        "longest-request",
        "received truncated message",
    ),
    (
        "large-buffer",
        "too-long-request",
        "an Add of 1025 bytes is refused",
    ),
    ("strict-fields", "unknown-fields", "unknown field"),
    (
        "listeners-in-own-netns",
        "add-opens-listeners",
        "seen:     []",
    ),
    (
        "two-listeners",
        "add-opens-listeners",
        "seen:     [15001, 15006]",
    ),
    (
        "ack-before-listening",
        "add-opens-listeners",
        "with the acknowledgement of its Add",
    ),
    (
        "del-ignored",
        "del-closes-listeners",
        "no listeners in the pod after Del",
    ),
    (
        "exit-on-unknown-del",
        "del-of-an-unknown-pod",
        "one answer to Del unknown",
    ),
    (
        "restart-on-same-netns",
        "same-netns-restarts-nothing",
        "the same listeners",
    ),
    (
        "stay-in-old-netns",
        "other-netns-moves",
        "an Add with another netns",
    ),
    (
        "disconnect-stops-pods",
        "pods-outlive-the-connection",
        "after a reconnect",
    ),
    (
        "never-stop-the-unnamed",
        "snapshot-stops-the-unnamed",
        "that the snapshot did not name",
    ),
    (
        "stop-before-snapshot-sent",
        "nothing-stops-before-the-snapshot-ends",
        "before SnapshotSent",
    ),
    ("keep-nothing", "keep-of-a-known-pod", "that was kept"),
    (
        "del-in-snapshot-ignored",
        "del-in-the-snapshot",
        "that was deleted in the snapshot",
    ),
    (
        "names-outlive-the-connection",
        "broken-snapshot",
        "that only the broken snapshot named",
    ),
    ("ack-start-failures", "start-failure", "Add bad is refused"),
    ("nack-closes", "start-failure", "the end of the connection"),
    ("pending-blocks", "start-failure", "one answer to Add good"),
    (
        "pending-half-open",
        "start-failure",
        "all listeners or none",
    ),
    (
        "pending-survives",
        "forgotten-pod-is-not-retried",
        "of an earlier connection",
    ),
    (
        "pending-survives-del",
        "deleted-pod-is-not-retried",
        "that failed and was deleted",
    ),
    (
        "pending-add-ignored",
        "pending-pod-is-added-again",
        "of its second Add",
    ),
    (
        "del-in-snapshot-sticks",
        "deleted-pod-is-named-again",
        "that was named again after its Del",
    ),
    (
        "leak-fd",
        "descriptors-are-returned",
        "descriptors after 50 cycles",
    ),
    (
        "leak-refused-fd",
        "add-with-two-descriptors",
        "descriptors as before",
    ),
    (
        "no-descriptor-accepted",
        "add-without-descriptor",
        "an Add without a descriptor is refused",
    ),
    (
        "silent-read-error",
        "undecodable-packet",
        "one answer to an undecodable packet",
    ),
    (
        "read-error-stops-pods",
        "undecodable-packet",
        "after an undecodable packet",
    ),
    (
        "exit-on-read-error",
        "undecodable-packet",
        "the process ended with exit code 1",
    ),
    (
        "second-snapshot-accepted",
        "second-snapshot",
        "a second SnapshotSent is refused",
    ),
    (
        "keep-after-snapshot-accepted",
        "keep-after-the-snapshot",
        "a Keep after SnapshotSent is refused",
    ),
    (
        "no-info-accepted",
        "add-without-info",
        "an Add without workload_info is refused",
    ),
    (
        "no-reconnect",
        "agent-half-closes",
        "the end of the connection",
    ),
    (
        "disconnect-stops-pods",
        "agent-restarts",
        "while the agent is away",
    ),
    (
        "del-ignored",
        "deleted-pod-comes-back",
        "no listeners in the pod after Del",
    ),
    (
        "unmarked-listeners",
        "listeners-are-marked",
        "no mark on [15001, 15006, 15008]",
    ),
    ("two-listeners", "keep-of-an-unknown-pod", "[15001, 15006]"),
    ("nack-closes", "start-failure-in-the-snapshot", "Add good"),
    ("nack-closes", "no-netns", "Del a"),
    (
        "ack-start-failures",
        "start-failure-is-taken-back",
        "Add a is refused",
    ),
    (
        "leak-refused-fd",
        "del-with-descriptor",
        "descriptors as before",
    ),
    ("silent-read-error", "unknown-request", "one answer to"),
    (
        "disconnect-stops-pods",
        "empty-packet",
        "after an empty packet",
    ),
    ("leak-fd", "storm", "descriptors after the storm"),
    ("keep-nothing", "storm-of-keeps", "which was kept"),
    (
        "loopback-only",
        "listeners-on-every-address",
        "listeners on [127.0.0.1]",
    ),
    (
        "v4-only",
        "listeners-on-every-address",
        "listeners on [0.0.0.0]",
    ),
    (
        "v6-only",
        "listeners-on-every-address",
        "a connection to 127.0.0.1:15001",
    ),
    (
        "never-accepts",
        "connections-are-accepted",
        "connections that wait: [(15001, ",
    ),
    (
        "no-reuseport",
        "ports-can-be-shared",
        "a second listener on port 15001",
    ),
    (
        "unmarked-upstreams",
        "inbound-connections-are-forwarded",
        "SYN packets without the mark",
    ),
    (
        "unmarked-upstreams",
        "outbound-connections-are-forwarded",
        "SYN packets without the mark",
    ),
    (
        "own-source-address",
        "inbound-connections-are-forwarded",
        "the client's address 10.77.0.1",
    ),
    (
        "ignores-original-destination",
        "inbound-connections-are-forwarded",
        "at the client: the end of the connection",
    ),
    (
        "ignores-original-destination",
        "outbound-connections-are-forwarded",
        "at the client: the end of the connection",
    ),
    (
        "ignores-half-closes",
        "half-closes-are-forwarded",
        "has sent all",
    ),
    (
        "forwards-direct-connections",
        "direct-connections-are-closed",
        "connections of ztunnel to its own listeners",
    ),
    (
        "del-keeps-connections",
        "del-ends-connections",
        "the end of an inbound connection",
    ),
    (
        "del-keeps-connections",
        "move-ends-connections",
        "the end of an inbound connection",
    ),
    (
        "disconnect-stops-pods",
        "connections-outlive-the-agent",
        "after a reconnect",
    ),
];

/// The faults of a ztunnel that only cases with long waits catch.
pub(crate) const THOROUGH_OF_A_ZTUNNEL: &[Row] = &[
    (
        "stops-pods-later",
        "agent-away-for-long",
        "while the agent is away",
    ),
    (
        "long-backoff",
        "agent-away-for-long",
        "a connection within 17s",
    ),
    (
        "gives-up-on-silence",
        "silence-before-the-snapshot",
        "the end of the connection",
    ),
    (
        "gives-up-on-silence",
        "silence-in-the-snapshot",
        "the end of the connection",
    ),
    (
        "gives-up-on-silence",
        "silence-after-the-snapshot",
        "the end of the connection",
    ),
];

pub(crate) const OF_AN_AGENT: &[Row] = &[
    ("world-socket", "socket-permissions", "0666"),
    (
        "stale-socket-fatal",
        "stale-socket",
        "an agent that starts where one was killed",
    ),
    ("before-hello", "nothing-before-the-hello", "A2:"),
    (
        "before-set",
        "nothing-before-the-set",
        "seen:     SnapshotSent",
    ),
    ("no-hello-timeout", "hello-missing", "it stays"),
    ("hello-unchecked", "hello-of-another-version", "A2:"),
    ("two-fds", "live-add", "Add p0 with 2"),
    ("no-fd", "live-add", "Add p0 with 0"),
    ("wrong-netns", "live-add", "A5: the netns of p0"),
    ("no-netns", "live-add", "/dev/null"),
    ("o-path", "live-add", "O_PATH"),
    ("no-info", "live-add", "A6:"),
    ("early-success", "live-add", "before its acknowledgement"),
    ("fd-on-del", "live-del", "Del p0 with 1"),
    ("forgets-del", "live-del", "a request within"),
    ("resurrects", "live-del", "A23:"),
    ("fd-on-snapshot", "empty-snapshot", "SnapshotSent with 1"),
    ("empty-datagram", "empty-snapshot", "A7: no empty packet"),
    ("second-snapshot", "empty-snapshot", "A8: SnapshotSent once"),
    ("keep-after-snapshot", "empty-snapshot", "A9:"),
    ("no-end", "empty-snapshot", "a request within"),
    (
        "leaves-one-out",
        "snapshot-names-each-pod-once",
        "A8: p2 in the snapshot",
    ),
    (
        "names-one-twice",
        "snapshot-names-each-pod-once",
        "A8: p0 once",
    ),
    ("pipelined", "one-at-a-time", "A4:"),
    ("netns-change-ignored", "other-netns", "A5: the netns of p0"),
    (
        "old-netns-credited",
        "other-netns",
        "acknowledged in another netns",
    ),
    (
        "info-change-ignored",
        "other-information",
        "seen:     Add p0",
    ),
    (
        "too-long",
        "too-long-names",
        "A7: no packet of more than 1024",
    ),
    ("credits-late-ack", "late-answer", "answered too late"),
    ("credits-close", "ztunnel-hangs-up", "whose ztunnel hung up"),
    ("unasked-ignored", "unasked-answer", "it stays"),
    ("garbage-credited", "undecodable-answer", "it stays"),
    ("half-close-ignored", "half-closed-connection", "it stays"),
    ("nack-credited", "start-failure", "a request within"),
    ("no-del-after-nack", "start-failure", "a request within"),
    (
        "never-retries",
        "start-failure-in-the-snapshot",
        "a request within",
    ),
    (
        "small-buffer",
        "refusal-of-1500-bytes",
        "a connection that stays",
    ),
    ("latest-only", "two-ztunnels", "a request within"),
    ("head-of-line", "silent-ztunnels-hold-up-nobody", "A18"),
    ("unpaced", "connections-are-paced", "A20:"),
    ("leak-fd", "descriptors-are-returned", "A24:"),
    ("second-hello-ignored", "second-hello", "it stays"),
    ("hello-unchecked", "answer-before-the-hello", "A2:"),
    (
        "leaves-one-out",
        "keep-while-the-netns-is-unknown",
        "Keep unknown",
    ),
    (
        "leaves-one-out",
        "each-session-is-told-everything",
        "A8: p2 in the snapshot",
    ),
    (
        "leaves-one-out",
        "snapshot-that-broke-off",
        "a ztunnel that knows",
    ),
    ("two-fds", "longest-names", "with 2"),
    ("credits-late-ack", "missing-answer", "it stays"),
    ("unasked-ignored", "second-answer", "it stays"),
    ("garbage-credited", "answer-without-payload", "it stays"),
    ("garbage-credited", "hello-for-an-answer", "it stays"),
    ("nack-credited", "read-error", "A10:"),
    ("nack-credited", "protocol-error", "A10:"),
    (
        "small-buffer",
        "refusal-of-60000-bytes",
        "a connection that stays",
    ),
    ("forgets-del", "order-per-pod", "the add of p0"),
    (
        "forgets-del",
        "new-session-during-changes",
        "a ztunnel that knows",
    ),
    ("forgets-del", "storm", "a ztunnel that knows"),
    (
        "hello-strict",
        "hello-with-unknown-field",
        "a connection that stays",
    ),
    ("leak-fd-at-move", "descriptors-after-moves", "A24:"),
    (
        "voided-ack-credited",
        "add-during-del",
        "while the Del of the pod is not answered",
    ),
    (
        "caller-ends-session",
        "impatient-caller",
        "a connection that stays",
    ),
    (
        "info-in-snapshot-ignored",
        "other-information-in-the-snapshot",
        "A21: Del",
    ),
    ("dels-last", "removal-under-load", "A26: at most"),
    (
        "snapshot-ends-last",
        "snapshot-under-load",
        "A26: SnapshotSent",
    ),
];
