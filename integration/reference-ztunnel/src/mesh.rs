//! Knows the pods that this process serves, as peers of each other.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use zds_client::WorkloadInfo;

use crate::enter::Inside;
use crate::identity::{Authority, Identity};

/// The mesh of the served pods. Calls to the addresses of members go by HBONE, all other calls in plaintext.
pub(crate) struct Mesh {
    authority: Authority,
    members: Mutex<BTreeMap<Arc<str>, Member>>,
}

#[derive(Clone)]
struct Member {
    name: Arc<str>,
    inside: Inside,
}

impl Mesh {
    pub(crate) fn open(directory: &Path) -> io::Result<Self> {
        Ok(Self {
            authority: Authority::open(directory)?,
            members: Mutex::default(),
        })
    }

    fn members(&self) -> std::sync::MutexGuard<'_, BTreeMap<Arc<str>, Member>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn join(
        &self,
        uid: &Arc<str>,
        workload: &WorkloadInfo,
        inside: &Inside,
    ) -> io::Result<Identity> {
        let identity = self.authority.issue(workload)?;
        let member = Member {
            name: Arc::clone(&identity.name),
            inside: inside.clone(),
        };
        self.members().insert(Arc::clone(uid), member);
        Ok(identity)
    }

    pub(crate) fn leave(&self, uid: &str) {
        self.members().remove(uid);
    }

    /// Returns the name of the workload with an address. ZDS names no addresses, so the addresses are read in each pod,
    /// at each call because an IPv6 address may come late.
    pub(crate) async fn name_at(&self, address: IpAddr) -> Option<Arc<str>> {
        let members: Vec<_> = self.members().values().cloned().collect();
        for member in members {
            let addresses = member.inside.run(addresses).await;
            if addresses.is_ok_and(|all| all.contains(&address)) {
                return Some(member.name);
            }
        }
        None
    }
}

/// Returns the addresses in the netns of the calling thread.
fn addresses() -> io::Result<Vec<IpAddr>> {
    let interfaces = nix::ifaddrs::getifaddrs()?;
    let addresses = interfaces.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|it| SocketAddr::from(*it));
        let v6 = address.as_sockaddr_in6().map(|it| SocketAddr::from(*it));
        Some(v4.or(v6)?.ip())
    });
    Ok(addresses.filter(|it| !it.is_loopback()).collect())
}
