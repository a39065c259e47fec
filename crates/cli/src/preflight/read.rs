//! Reads the facts, from the API server or from files.
use std::path::Path;

use anyhow::{Context as _, Result};
use cleave_plan::constraints::Labels;
use kube::Client;
use kube::api::ListParams;
use kube::core::{ListMeta, Request};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::facts::{Facts, ReadResult};

/// Maximum number of objects in one page of a list.
const PAGE_SIZE: u32 = 500;

/// A list that preflight reads.
pub(super) struct Source {
    /// Name of the API group. Empty for the core group.
    pub(super) group: &'static str,
    /// Name of the resource. The file is `RESOURCE.json`.
    pub(super) resource: &'static str,
    /// Whether preflight reads only the objects of the target namespace.
    namespaced: bool,
    /// Whether preflight reads only the metadata of the objects.
    metadata_only: bool,
}

/// All lists that preflight reads. The `ClusterRole` of `deploy/preflight.yaml` allows these lists.
#[cfg(test)]
pub(super) const SOURCES: [&Source; 10] = [
    &NODES,
    &DAEMON_SETS,
    &RUNTIME_CLASSES,
    &QUOTAS,
    &LIMIT_RANGES,
    &NAMESPACES,
    &PRIORITY_CLASSES,
    &DEFINITIONS,
    &MUTATING_WEBHOOKS,
    &VALIDATING_WEBHOOKS,
];

const NODES: Source = Source::all("", "nodes");
const DAEMON_SETS: Source = Source::all("apps", "daemonsets");
const RUNTIME_CLASSES: Source = Source::all("node.k8s.io", "runtimeclasses").only_metadata();
const QUOTAS: Source = Source { namespaced: true, ..Source::all("", "resourcequotas") };
const LIMIT_RANGES: Source = Source { namespaced: true, ..Source::all("", "limitranges") };
const NAMESPACES: Source = Source::all("", "namespaces").only_metadata();
const PRIORITY_CLASSES: Source = Source::all("scheduling.k8s.io", "priorityclasses").only_metadata();
const DEFINITIONS: Source = Source::all("apiextensions.k8s.io", "customresourcedefinitions").only_metadata();
const MUTATING_WEBHOOKS: Source = Source::all("admissionregistration.k8s.io", "mutatingwebhookconfigurations");
const VALIDATING_WEBHOOKS: Source = Source::all("admissionregistration.k8s.io", "validatingwebhookconfigurations");

/// The API group and version of admission policies.
const ADMISSION_API: &str = "admissionregistration.k8s.io/v1";
/// File with the version of the API server.
const VERSION_FILE: &str = "version.json";
/// File with the resources of [`ADMISSION_API`].
const ADMISSION_FILE: &str = "admission.json";

impl Source {
    const fn all(group: &'static str, resource: &'static str) -> Self {
        Self { group, resource, namespaced: false, metadata_only: false }
    }

    const fn only_metadata(self) -> Self {
        Self { metadata_only: true, ..self }
    }

    /// Returns the path of the list on the API server. All lists use version v1 of their API.
    pub(super) fn path(&self, namespace: &str) -> String {
        let group = if self.group.is_empty() { "/api/v1".to_owned() } else { format!("/apis/{}/v1", self.group) };
        let scope = if self.namespaced { format!("/namespaces/{namespace}") } else { String::new() };
        format!("{group}{scope}/{}", self.resource)
    }

    /// Returns the name of the file with the list.
    pub(super) fn file_name(&self) -> String {
        format!("{}.json", self.resource)
    }
}

/// One page of a list.
#[derive(Deserialize)]
struct Page<T> {
    #[serde(default)]
    metadata: ListMeta,
    items: Vec<T>,
}

/// Reads the facts from the API server. A list that cannot be read becomes an error in [`Facts`].
///
/// # Errors
/// Returns an error if the API server does not respond to the first request.
pub(super) async fn from_cluster(client: &Client, namespace: &str) -> Result<Facts> {
    let version = Request::new("/version").list(&ListParams::default()).context("failed to build a request")?;
    let server = match client.request(version).await {
        Err(kube::Error::Api(status)) => Err(status.message.clone()),
        answer => Ok(answer.context("failed to reach the API server")?),
    };
    let path = format!("/apis/{ADMISSION_API}");
    Ok(Facts {
        server,
        admission: request_page(client, &path, &ListParams::default(), false)
            .await
            .map_err(|error| describe_error(&error)),
        nodes: read_list(client, &NODES, namespace).await,
        daemon_sets: read_list(client, &DAEMON_SETS, namespace).await,
        runtime_classes: read_list(client, &RUNTIME_CLASSES, namespace).await,
        quotas: read_list(client, &QUOTAS, namespace).await,
        limit_ranges: read_list(client, &LIMIT_RANGES, namespace).await,
        namespaces: read_list(client, &NAMESPACES, namespace).await,
        priority_classes: read_list(client, &PRIORITY_CLASSES, namespace).await,
        definitions: read_list(client, &DEFINITIONS, namespace).await,
        mutating_webhooks: read_list(client, &MUTATING_WEBHOOKS, namespace).await,
        validating_webhooks: read_list(client, &VALIDATING_WEBHOOKS, namespace).await,
    })
}

/// Reads a list page by page.
async fn read_list<T: DeserializeOwned>(client: &Client, source: &Source, namespace: &str) -> ReadResult<Vec<T>> {
    let path = source.path(namespace);
    let mut options = ListParams::default().limit(PAGE_SIZE);
    let mut items = Vec::new();
    loop {
        let page: Page<T> = request_page(client, &path, &options, source.metadata_only)
            .await
            .map_err(|error| describe_error(&error))?;
        items.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => options = options.continue_token(&token),
            None => return Ok(items),
        }
    }
}

async fn request_page<T: DeserializeOwned>(
    client: &Client,
    path: &str,
    options: &ListParams,
    metadata_only: bool,
) -> kube::Result<T> {
    let request = Request::new(path);
    let request = if metadata_only { request.list_metadata(options) } else { request.list(options) };
    client.request(request.map_err(kube::Error::BuildRequest)?).await
}

/// Describes why a list could not be read.
fn describe_error(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        error => error.to_string(),
    }
}

/// Reads the facts from the files of a directory. A missing or malformed file becomes an error in
/// [`Facts`].
pub(super) fn from_directory(directory: &Path) -> Facts {
    Facts {
        server: read_file(directory, VERSION_FILE),
        admission: read_file(directory, ADMISSION_FILE),
        nodes: read_list_file(directory, &NODES),
        daemon_sets: read_list_file(directory, &DAEMON_SETS),
        runtime_classes: read_list_file(directory, &RUNTIME_CLASSES),
        quotas: read_list_file(directory, &QUOTAS),
        limit_ranges: read_list_file(directory, &LIMIT_RANGES),
        namespaces: read_list_file(directory, &NAMESPACES),
        priority_classes: read_list_file(directory, &PRIORITY_CLASSES),
        definitions: read_list_file(directory, &DEFINITIONS),
        mutating_webhooks: read_list_file(directory, &MUTATING_WEBHOOKS),
        validating_webhooks: read_list_file(directory, &VALIDATING_WEBHOOKS),
    }
}

/// Reads a list of objects, or one object, as `kubectl get -o json` writes it.
fn read_list_file<T: DeserializeOwned>(directory: &Path, source: &Source) -> ReadResult<Vec<T>> {
    let name = source.file_name();
    let mut document: Map<String, Value> = read_file(directory, &name)?;
    let items = match document.remove("items") {
        Some(items) => items,
        None if document.contains_key("metadata") => Value::Array(vec![Value::Object(document)]),
        None => return Err(format!("{name} is malformed: it contains neither a list nor an object")),
    };
    serde_json::from_value(items).map_err(|error| format!("{name} is malformed: {error}"))
}

fn read_file<T: DeserializeOwned>(directory: &Path, name: &str) -> ReadResult<T> {
    let path = directory.join(name);
    let text = std::fs::read(&path).map_err(|error| format!("failed to read {}: {error}", path.display()))?;
    serde_json::from_slice(&text).map_err(|error| format!("{} is malformed: {error}", path.display()))
}

/// Parses labels, such as `gpu=cleave,zone=a`.
///
/// # Errors
/// Returns an error if a part is not `NAME=VALUE`.
pub(super) fn parse_labels(text: &str) -> Result<Labels, String> {
    let pair = |part: &str| {
        let (key, value) = part.split_once('=').ok_or_else(|| format!("{part:?} is not LABEL=VALUE"))?;
        Ok((key.trim().to_owned(), value.trim().to_owned()))
    };
    text.split(',').filter(|part| !part.trim().is_empty()).map(pair).collect()
}
