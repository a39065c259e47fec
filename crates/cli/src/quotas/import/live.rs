//! Reads the objects of Nos and Kueue from a cluster.
use anyhow::{Context as _, Result};
use kube::Client;
use kube::api::ListParams;
use kube::core::discovery::ApiResource;
use kube::core::{DynamicObject, GroupVersionKind};
use kube::{Api, discovery};

use super::input::{KUEUE_GROUP, NOS_GROUPS, Objects};

/// Maximum number of objects in one page of a list.
const PAGE_SIZE: u32 = 500;
/// The kinds that the import reads from Nos and Kueue.
const KINDS: [&str; 6] =
    ["ElasticQuota", "CompositeElasticQuota", "ClusterQueue", "LocalQueue", "ResourceFlavor", "Cohort"];

/// Lists the objects, in the version that the cluster prefers. A group that is not installed has no
/// objects.
///
/// # Errors
/// Returns an error if the API server refuses a request.
pub(super) async fn read(client: &Client, objects: &mut Objects) -> Result<()> {
    for group in NOS_GROUPS.into_iter().chain([KUEUE_GROUP]) {
        let found = match discovery::group(client, group).await {
            Err(kube::Error::Discovery(_)) => continue,
            Err(kube::Error::Api(status)) if status.code == 404 => continue,
            found => found.with_context(|| format!("failed to read the API group {group}"))?,
        };
        for (resource, _) in found.recommended_resources() {
            if KINDS.contains(&resource.kind.as_str()) {
                list_objects(client, &resource, objects).await?;
            }
        }
    }
    Ok(())
}

async fn list_objects(client: &Client, resource: &ApiResource, objects: &mut Objects) -> Result<()> {
    let api = Api::<DynamicObject>::all_with(client.clone(), resource);
    let kind = GroupVersionKind::gvk(&resource.group, &resource.version, &resource.kind);
    let mut page = ListParams::default().limit(PAGE_SIZE);
    loop {
        let list = api.list(&page).await.with_context(|| format!("failed to list {}", resource.plural))?;
        for object in list.items {
            let mut value = serde_json::to_value(&object).context("failed to read an object")?;
            value["apiVersion"] = kind.api_version().into();
            value["kind"] = resource.kind.clone().into();
            objects.add_object(value)?;
        }
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            None => return Ok(()),
            Some(token) => page = page.continue_token(&token),
        }
    }
}
