//! Reads documents from files, standard input and the cluster.
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use kube::Client;
use kube::api::ListParams;
use kube::core::Request;
use serde_json::Value;

use super::input::Document;
use super::yaml;

/// Maximum number of objects in one page of a list.
const PAGE_SIZE: u32 = 500;
/// The lists that `cleave migrate` reads from every cluster: the path of each list and the kind of
/// its objects.
const ALWAYS_READ_LISTS: [(&str, &str); 2] = [("/api/v1/nodes", "Node"), ("/api/v1/configmaps", "ConfigMap")];
/// The list of the GPU Operator's settings. The list does not exist without the GPU Operator.
const CLUSTER_POLICY_LIST: (&str, &str) = ("/apis/nvidia.com/v1/clusterpolicies", "ClusterPolicy");
/// The list that only the preview needs.
const POD_LIST: (&str, &str) = ("/api/v1/pods", "Pod");

/// Reads the documents of files. The file `-` is standard input.
///
/// # Errors
/// Returns an error if a file cannot be read, or is not valid YAML.
pub(super) fn from_files(files: &[PathBuf]) -> Result<Vec<Document>> {
    let mut documents = Vec::new();
    for path in files {
        let origin = if path == Path::new("-") { "standard input".to_owned() } else { path.display().to_string() };
        let text = read_text(path).with_context(|| format!("failed to read {origin}"))?;
        documents.extend(self::parse_documents(&origin, &text)?);
    }
    Ok(documents)
}

/// Parses the documents of a YAML stream.
///
/// # Errors
/// Returns an error if the text is not valid YAML.
pub(super) fn parse_documents(origin: &str, text: &str) -> Result<Vec<Document>> {
    let values = yaml::parse_all(text).with_context(|| origin.to_owned())?;
    Ok(values.into_iter().map(|value| Document { origin: origin.to_owned(), value, chosen: true }).collect())
}

fn read_text(path: &Path) -> std::io::Result<String> {
    if path == Path::new("-") {
        let mut text = String::new();
        return std::io::stdin().read_to_string(&mut text).map(|_| text);
    }
    std::fs::read_to_string(path)
}

/// Reads nodes, `ConfigMap`s, the settings of the GPU Operator and, for the preview, pods.
///
/// # Errors
/// Returns an error if the API server does not respond, or refuses a list. A missing list of the
/// GPU Operator's settings is not an error.
pub(super) async fn from_cluster(client: &Client, preview: bool) -> Result<Vec<Document>> {
    let mut documents = Vec::new();
    for (path, kind) in ALWAYS_READ_LISTS.into_iter().chain(preview.then_some(POD_LIST)) {
        read_list(client, path, kind, &mut documents).await.with_context(|| format!("failed to list {path}"))?;
    }
    let (path, kind) = CLUSTER_POLICY_LIST;
    match read_list(client, path, kind, &mut documents).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        other => other.with_context(|| format!("failed to list {path}"))?,
    }
    Ok(documents)
}

/// Reads a list page by page. Sets the `kind` of each object, because lists omit it.
async fn read_list(client: &Client, path: &str, kind: &str, documents: &mut Vec<Document>) -> kube::Result<()> {
    let mut options = ListParams::default().limit(PAGE_SIZE);
    loop {
        let request = Request::new(path).list(&options).map_err(kube::Error::BuildRequest)?;
        let mut page: Value = client.request(request).await?;
        let items = page.get_mut("items").map(Value::take).unwrap_or_default();
        let Value::Array(items) = items else { return Ok(()) };
        for mut item in items {
            if let Some(object) = item.as_object_mut() {
                object.insert("kind".to_owned(), kind.into());
            }
            documents.push(Document { origin: "the cluster".to_owned(), value: item, chosen: false });
        }
        match page.pointer("/metadata/continue").and_then(Value::as_str).filter(|token| !token.is_empty()) {
            Some(token) => options = options.continue_token(token),
            None => return Ok(()),
        }
    }
}
