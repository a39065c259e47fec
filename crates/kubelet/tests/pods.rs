//! Tests the PodResources client with a fake kubelet on a Unix socket.

use std::path::Path;
use std::time::Duration;

use cleave_kubelet::fake::FakePodResources;
use cleave_kubelet::{AllocatableDevices, ContainerDevices, PodResources, PodResourcesError};

const TEST_TIMEOUT: Duration = Duration::from_secs(20);

fn container_devices(pod: &str, ids: &[&str]) -> ContainerDevices {
    ContainerDevices {
        namespace: "default".to_owned(),
        pod: pod.to_owned(),
        container: "main".to_owned(),
        resource: "nvidia.com/gpu-mps".to_owned(),
        ids: ids.iter().map(ToString::to_string).collect(),
    }
}

#[tokio::test]
async fn allocated_and_allocatable_devices_are_listed_even_after_a_restart() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("kubelet.sock");
    let pods = PodResources::new(&socket, TEST_TIMEOUT).expect("a client");
    let elsewhere = pods.clone();
    let nobody = tokio::spawn(async move { elsewhere.list().await }).await.expect("a task");
    assert!(matches!(nobody, Err(PodResourcesError::Call(_))), "no process serves yet");
    for round in 0..3 {
        let kubelet = FakePodResources::start(&socket).expect("a kubelet");
        assert_eq!(pods.list().await.expect("a list"), []);
        let rows =
            [container_devices(&format!("pod-{round}"), &["a::0", "a::1"]), container_devices("other", &["a::2"])];
        kubelet.set_devices(&rows);
        assert_eq!(pods.list().await.expect("a list"), rows);
        let rows = [AllocatableDevices { resource: "r".into(), ids: vec!["a::0".into()], numa: vec![0, 1] }];
        kubelet.set_allocatable(&rows);
        assert_eq!(pods.list_allocatable().await.expect("a list"), rows);
    }
}

#[tokio::test]
async fn a_call_to_a_hanging_kubelet_times_out() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("kubelet.sock");
    let kubelet = FakePodResources::start(&socket).expect("a kubelet");
    kubelet.set_hanging(true);
    let pods = PodResources::new(&socket, Duration::from_millis(20)).expect("a client");
    let answer = tokio::time::timeout(TEST_TIMEOUT, pods.list()).await.expect("an end");
    let error = answer.expect_err("the kubelet hangs");
    assert_eq!(error.to_string(), "the kubelet's PodResources API did not answer within 0.02 s");
    kubelet.set_hanging(false);
    PodResources::new(&socket, TEST_TIMEOUT).expect("a client").list().await.expect("a list");
}

#[tokio::test]
async fn a_relative_path_is_refused() {
    assert!(matches!(PodResources::new(Path::new("x"), TEST_TIMEOUT), Err(PodResourcesError::Path(_))));
}
