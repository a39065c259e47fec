//! Tests that the commands on the tutorial and how-to pages succeed on this cluster and print the
//! output that the pages show.
//!
//! Comments on the pages mark the code blocks that the tests run. `cleave_docs_commands` parses
//! these comments.
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use cleave_docs_commands::{BlockTest, CodeBlock, parse_blocks};
use cleave_e2e::{Cluster, GPU_NODES_PATH, Scope, apply_manifest, kubectl, wait_until};
use serde_json::json;

use crate::health::cleave_path;
use crate::{GPUS_PER_NODE, HOLD_CLIENT_SCRIPT, NODE, SHARES_RESOURCE, wait_until_advertised};

/// Timeout of one block, in seconds. The slowest block waits a minute for a pod.
const BLOCK_TIMEOUT_SECONDS: u64 = 90;
/// Maximum time until a block that is marked `retry` prints the output that the page shows.
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);
/// The namespace of the demo's pods, which the commands in the tutorial use.
const DEMO_NAMESPACE: &str = "demo";
/// The name of the test's scope. In its namespace, `e2e-docs`, the commands with the pages'
/// placeholders run.
const SCOPE_NAME: &str = "docs";
/// The how-to guides, in the order in which the test runs them. The last guide deletes all
/// policies.
const GUIDES: [&str; 21] = [
    "preflight",
    "install",
    "platforms",
    "enable-nodes",
    "migrate",
    "divide",
    "mig",
    "priorities",
    "autoscaling",
    "quotas",
    "elastic-quotas",
    "kueue",
    "exceptions",
    "monitor",
    "drain",
    "failing-gpus",
    "restart-nodes",
    "upgrade",
    "check-driver",
    "troubleshoot",
    "uninstall",
];

#[test]
fn commands_of_the_pages_run_and_print_what_the_pages_show() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, SCOPE_NAME)?;
    let _cleanup = CreatedObjects::new(&cluster);
    start_demo(&cluster)?;
    run_page("tutorial/first-shares.md")?;
    delete_demo(&cluster)?;
    // Create a pod for the guides' command `cleave explain`. The pod waits until a guide applies a
    // policy to all nodes.
    scope.create_pod_on_node("node2", "waits", &json!({SHARES_RESOURCE: 1}), HOLD_CLIENT_SCRIPT)?;
    for guide in GUIDES {
        run_page(&format!("how-to/{guide}.md"))?;
    }
    Ok(())
}

#[test]
fn the_api_server_accepts_the_policies_and_quotas_on_the_pages() -> Result<()> {
    let mut checked = 0;
    for page in list_pages("how-to")? {
        let text = std::fs::read_to_string(&page)?;
        for objects in policies_and_quotas_in(&text) {
            let file = std::env::temp_dir().join(format!("cleave-docs-{}.yaml", std::process::id()));
            std::fs::write(&file, objects)?;
            let accepted = kubectl(&["apply", "--dry-run=server", "-f", &file.to_string_lossy()]);
            std::fs::remove_file(&file)?;
            accepted.with_context(|| format!("objects of {}:\n{objects}", page.display()))?;
            checked += 1;
        }
    }
    ensure!(checked > 0, "no page has a policy or a quota");
    Ok(())
}

#[test]
fn commands_of_each_guide_run_and_print_what_the_guide_shows() -> Result<()> {
    let mut expected: Vec<String> = GUIDES.iter().map(|guide| format!("{guide}.md")).collect();
    expected.sort();
    let mut found: Vec<String> = list_pages("how-to")?
        .iter()
        .filter_map(|page| Some(page.file_name()?.to_string_lossy().into_owned()))
        .collect();
    found.sort();
    ensure!(found == expected, "GUIDES lists {expected:?}, docs/how-to has {found:?}");
    Ok(())
}

/// Deletes objects that the pages' commands create. Creating this value deletes the objects of an
/// earlier, killed run. Dropping this value deletes the objects of this run. A test must declare
/// this value after the scope, so that this value is dropped first, because dropping the scope
/// waits until all GPUs are whole.
struct CreatedObjects<'a>(&'a Cluster);

impl<'a> CreatedObjects<'a> {
    fn new(cluster: &'a Cluster) -> Self {
        let cleanup = Self(cluster);
        cleanup.remove();
        cleanup
    }

    fn remove(&self) {
        let uncordoned = json!({"metadata": {"annotations": {"cleave.dev/cordon": null, "cleave.dev/quiesce": null}}});
        let results = [
            kubectl(&["delete", "sharingpolicy", "ten-shares", "--ignore-not-found"]).map(drop),
            delete_demo(self.0),
            kubectl(&["delete", "namespace", "e2e-docs-system", "--ignore-not-found"]).map(drop),
            kubectl(&["delete", "clusterrolebinding", "gpu-administrators", "--ignore-not-found"]).map(drop),
            self.0.patch(&format!("{GPU_NODES_PATH}/{NODE}"), &uncordoned).map(drop),
        ];
        for error in results.into_iter().filter_map(Result::err) {
            let _ = writeln!(std::io::stderr(), "failed to remove what the pages' commands created: {error:#}");
        }
    }
}

impl Drop for CreatedObjects<'_> {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Applies the demo's policy to [`NODE`], and starts the demo's pods.
fn start_demo(cluster: &Cluster) -> Result<()> {
    delete_demo(cluster)?;
    let policy = std::fs::read_to_string(repository_root().join("e2e/demo.yaml"))?;
    apply_manifest(&format!("{}\n  nodeSelector: {{kubernetes.io/hostname: {NODE}}}\n", policy.trim_end()))?;
    wait_until_advertised(cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)?;
    let pods = repository_root().join("e2e/demo-pods.yaml");
    // The API server refuses pods until the new namespace has its default service account.
    wait_until("the demo's pods are created", || kubectl(&["apply", "-f", &pods.to_string_lossy()]).map(|_| true))?;
    kubectl(&["-n", DEMO_NAMESPACE, "wait", "--for=condition=Ready", "pod", "--all", "--timeout=90s"]).map(drop)
}

/// Deletes the demo's pods with grace period 0, and the demo's namespace.
fn delete_demo(cluster: &Cluster) -> Result<()> {
    let namespace = format!("/api/v1/namespaces/{DEMO_NAMESPACE}");
    if cluster.find(&namespace)?.is_none() {
        return Ok(());
    }
    cluster.delete(&namespace, None)?;
    let gone = || {
        kubectl(&["-n", DEMO_NAMESPACE, "delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false"])?;
        Ok(cluster.find(&namespace)?.is_none())
    };
    wait_until("the namespace of the demo no longer exists", gone)
}

/// Runs the marked blocks of a page in order. Each block runs in a separate shell.
fn run_page(page: &str) -> Result<()> {
    let path = repository_root().join("docs").join(page);
    let text = std::fs::read_to_string(&path).with_context(|| format!("failed to read {}", path.display()))?;
    let (blocks, problems) = parse_blocks(&text);
    ensure!(problems.is_empty(), "docs/{page}: {problems:?}");
    for block in &blocks {
        let BlockTest::Run { retry, .. } = &block.test else { continue };
        let deadline = Instant::now() + RETRY_TIMEOUT;
        let started = Instant::now();
        while let Err(error) = run_block(block) {
            if !retry || Instant::now() > deadline {
                return Err(error.context(format!("docs/{page}:{}", block.line)));
            }
            std::thread::sleep(Duration::from_millis(500));
        }
        let _ = writeln!(std::io::stderr(), "docs/{page}:{} took {:?}", block.line, started.elapsed());
    }
    Ok(())
}

/// Runs a block once. The exit status must be 0, and the output must contain the lines that the
/// page shows.
fn run_block(block: &CodeBlock) -> Result<()> {
    let script = block.script();
    let program = PathBuf::from(cleave_path());
    let directory = program.parent().context("cleave has no directory")?;
    let path = format!("{}:{}", directory.display(), std::env::var("PATH").unwrap_or_default());
    let output = Command::new("timeout")
        .args([&BLOCK_TIMEOUT_SECONDS.to_string(), "bash", "-euc", &script])
        .current_dir(repository_root())
        .env("PATH", path)
        .stdin(Stdio::null())
        .output()
        .context("failed to run bash")?;
    let printed = String::from_utf8_lossy(&output.stdout);
    let mut report = String::new();
    let _ = write!(report, "{script}printed:\n{printed}{}", String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{}: {report}", output.status);
    let missing = block.output.as_ref().map(|shown| shown.missing_lines(&printed)).unwrap_or_default();
    ensure!(missing.is_empty(), "the output lacks {missing:?}: {report}");
    Ok(())
}

/// Returns the YAML blocks of a page that contain a complete policy or quota.
fn policies_and_quotas_in(page: &str) -> Vec<&str> {
    let blocks = page.split("```yaml\n").skip(1).filter_map(|rest| rest.split_once("```"));
    let is_complete =
        |text: &&str| ["SharingPolicy", "GpuQuota"].iter().any(|kind| text.contains(&format!("\nkind: {kind}\n")));
    blocks.map(|(text, _)| text).filter(is_complete).collect()
}

/// Lists the pages in a directory of the documentation.
fn list_pages(directory: &str) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(repository_root().join("docs").join(directory))?;
    entries.map(|entry| Ok(entry?.path())).collect()
}

/// Returns the root of the repository.
fn repository_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
