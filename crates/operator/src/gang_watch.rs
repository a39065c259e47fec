//! Watches the objects that state the sizes of gangs; see [`crate::gang_sizes`].
//!
//! Most clusters have none of these resources. The operator regularly asks the API server which of
//! them it serves, and watches only those. Until the groups of a kind are listed, or the cluster is
//! known not to have them, gangs whose size such a group could state wait.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kube::api::{ApiResource, DynamicObject};
use kube::runtime::watcher;
use kube::{Api, Client};
use tokio::task::JoinSet;

use crate::gang_sizes::{GroupKind, GroupStore};
use crate::metrics::{KindLabel, Metrics};
use crate::watches::{Wakers, is_absent, watch_config, watch_objects};

/// Time between two requests for the served resources.
const DISCOVERY_INTERVAL: Duration = Duration::from_secs(60);
/// Delay after a failed request for the served resources.
const DISCOVERY_RETRY: Duration = Duration::from_secs(5);

/// Watches the groups of all kinds that the API server serves, until the future is dropped.
pub(crate) async fn watch_groups(client: Client, store: GroupStore, wakes: Wakers, metrics: Metrics) {
    let (mut watches, mut watched) = (JoinSet::new(), BTreeSet::new());
    loop {
        let delay = match served_kinds(&client).await {
            Ok(served) => {
                for kind in GroupKind::ALL {
                    match served.get(&kind) {
                        Some(resource) if watched.insert(kind) => {
                            let api = Api::all_with(client.clone(), resource);
                            watches.spawn(watch_kind(kind, api, store.clone(), wakes.clone(), metrics.clone()));
                        }
                        None if !watched.contains(&kind) && store.record_absence(kind) => wakes.wake_placement(),
                        _ => {}
                    }
                }
                DISCOVERY_INTERVAL
            }
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "failed to find the resources that state the sizes of gangs; retrying"
                );
                DISCOVERY_RETRY
            }
        };
        tokio::time::sleep(delay).await;
    }
}

/// Watches the groups of one kind.
async fn watch_kind(kind: GroupKind, api: Api<DynamicObject>, store: GroupStore, wakes: Wakers, metrics: Metrics) {
    watch_objects(kind.name(), api, watch_config(), |event| {
        let has_changed = match event {
            Ok(event) => store.apply(kind, event),
            Err(error) => {
                let name = kind.name();
                metrics.watch_errors.get_or_create(&KindLabel { kind: name }).inc();
                tracing::warn!(kind = name, error = &error as &dyn std::error::Error, "watch failed; retrying");
                is_unreadable(&error) && store.record_absence(kind)
            }
        };
        if has_changed {
            wakes.wake_placement();
        }
    })
    .await;
}

/// Returns whether the cluster no longer has the watched resource, or the operator may not read it.
fn is_unreadable(error: &watcher::Error) -> bool {
    is_absent(error)
        || matches!(
            error,
            watcher::Error::InitialListFailed(kube::Error::Api(status))
            | watcher::Error::WatchStartFailed(kube::Error::Api(status)) if status.code == 403
        )
}

/// Returns the resources that the API server serves, each in the newest version that the operator
/// knows.
async fn served_kinds(client: &Client) -> kube::Result<BTreeMap<GroupKind, ApiResource>> {
    let groups = client.list_api_groups().await?.groups;
    let mut served = BTreeMap::new();
    for kind in GroupKind::ALL {
        let (group, versions, plural) = kind.resource();
        let Some(of) = groups.iter().find(|of| of.name == group) else { continue };
        for version in versions.iter().filter(|version| of.versions.iter().any(|of| of.version == **version)) {
            let resources = client.list_api_group_resources(&format!("{group}/{version}")).await?.resources;
            if let Some(resource) = resources.into_iter().find(|resource| resource.name == plural) {
                served.insert(
                    kind,
                    ApiResource {
                        group: group.to_owned(),
                        version: (*version).to_owned(),
                        api_version: format!("{group}/{version}"),
                        kind: resource.kind,
                        plural: plural.to_owned(),
                    },
                );
                break;
            }
        }
    }
    Ok(served)
}
