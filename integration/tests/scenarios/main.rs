//! Scenarios with the real binaries. The first module of a test's path says what the test needs; `integration/test`
//! selects by it.
// With cfg(test), clippy treats all of this as tests.
#![cfg(test)]

/// Parts that tests of several modules share.
mod common {
    pub(crate) mod asking;
    pub(crate) mod cluster;
    pub(crate) mod flows;
    pub(crate) mod incumbent;
    pub(crate) mod installer_host;
    pub(crate) mod mesh;
    pub(crate) mod policy_table;
    pub(crate) mod scripted;
    pub(crate) mod ztunnel_pod;
}

/// A node in network namespaces, with the reference ztunnel.
mod netns {
    mod adversity;
    mod away;
    mod binds;
    mod callers;
    mod command_lines;
    mod contracts;
    mod fields;
    mod floods;
    mod garbage;
    mod hostile;
    mod influences;
    mod installer;
    mod interrupted;
    mod leaving;
    mod lifecycle;
    mod logs;
    mod mutations;
    mod operations;
    mod paths;
    mod people;
    mod phases;
    mod places;
    mod policy;
    mod previous;
    mod reasons;
    mod reconcile;
    mod recorded;
    mod repair_peer;
    mod selectors;
    mod settings;
    mod sidecars;
    mod taken_over;
    mod traffic;
    mod upgrade;
    mod validation;
    mod zds_peers;
}

/// The same, one after another: tests of times, of load, of what a process costs and of the state of a process.
mod alone {
    mod broker_restart;
    mod burst;
    mod deletion;
    mod doctor;
    mod limits;
    mod restart;
    mod takeover;
    mod zds_storm;
}

/// A node of a real API server.
mod kube {
    mod away;
    mod binds;
    mod faults;
    mod injector;
    mod kubectl;
    mod leave;
    mod manifests;
    mod outputs;
    mod pods;
    mod reconcile;
    mod repair;
    mod rights;
    mod shipped;
    mod startup_taint;
    mod takeover;

    /// One after another.
    mod alone {
        mod chaos;
        mod namespaces;
    }
}

/// A real container runtime calls the plugin.
mod runtime;

/// A whole cluster of one node.
mod cluster;

/// A mesh of several nodes.
mod mesh;

/// A stock ztunnel instead of the reference one.
mod ztunnel;
