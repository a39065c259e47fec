//! Finds the pods and the container of a process from its cgroup (cgroups(7)). Pure.
//!
//! A container may create cgroups with any name below its own cgroup, and move its processes into
//! them. Therefore this module trusts only the path component nearest to the root that names a pod.
//! Only the node's system, the kubelet and the container runtime create the cgroups above this
//! component. Components below this component name no real pods, unless the node itself runs in a
//! pod.

/// The pod and container of a process.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessOwner {
    /// UID of the pod. A static pod's UID is the hash of its manifest.
    pub pod: String,
    /// Id of the container in the container runtime. `None` if the process belongs to the pod, but
    /// to no container of the pod.
    pub container: Option<String>,
}

/// Parses `/proc/PID/cgroup` and returns the owner of the process. Returns `None` if the process is
/// in no pod, or if two cgroup hierarchies name different pods.
pub fn parse_owner(text: &str) -> Option<ProcessOwner> {
    let mut found: Option<ProcessOwner> = None;
    for owner in cgroup_paths(text).filter_map(|path| owners_in_path(path).into_iter().next()) {
        match &mut found {
            None => found = Some(owner),
            Some(known) if known.pod != owner.pod => return None,
            Some(known) if known.container.is_none() => known.container = owner.container,
            Some(_) => {}
        }
    }
    found
}

/// Parses `/proc/PID/cgroup` and returns the UIDs of all pods in the path of the process, outermost
/// first. Trust only the first pod, because its containers may have created the other cgroups.
pub fn parse_pod_uids(text: &str) -> Vec<String> {
    // Use the first hierarchy that names pods, because all such hierarchies usually name the same
    // pods.
    let found = cgroup_paths(text).map(owners_in_path).find(|owners| !owners.is_empty());
    found.unwrap_or_default().into_iter().map(|owner| owner.pod).collect()
}

/// Returns the cgroup path of each hierarchy in `/proc/PID/cgroup`.
fn cgroup_paths(text: &str) -> impl Iterator<Item = &str> {
    // Each line is `hierarchy:controllers:path`, or `0::path` in version 2. A path may contain
    // colons.
    text.lines().filter_map(|line| line.splitn(3, ':').nth(2))
}

/// Returns the pods in a path, outermost first. Each pod comes with the container in the next
/// component of the path, if any.
fn owners_in_path(path: &str) -> Vec<ProcessOwner> {
    // The kernel appends this suffix to the path of a removed cgroup that still has processes.
    let path = path.strip_suffix(" (deleted)").unwrap_or(path);
    let mut components = path.split('/').filter(|component| !component.is_empty()).peekable();
    let mut below_kubepods = false;
    let mut outside = true;
    let mut found = Vec::new();
    while let Some(component) = components.next() {
        // If containerd uses the cgroupfs driver and the kubelet uses the systemd driver,
        // containerd joins three names with colons.
        let mut parts = component.split(':');
        let component = parts.next().unwrap_or_default();
        // In another cgroup namespace, a path begins with one `..` for each level up to the common
        // ancestor. The common ancestor may be below `kubepods`.
        let plain = component.strip_prefix("pod").filter(|_| below_kubepods || outside);
        if let Some(pod) = plain.or_else(|| pod_in_slice_name(component)).and_then(parse_pod_uid) {
            let inside = parts.next_back().or_else(|| components.peek().copied());
            found.push(ProcessOwner { pod, container: inside.and_then(parse_container_id) });
        }
        below_kubepods |= component == "kubepods";
        outside &= matches!(component, ".." | "burstable" | "besteffort");
    }
    found
}

/// Returns the UID part of a pod's cgroup name under systemd, such as
/// `kubepods-burstable-pod<uid>.slice`. Nested kubelets prepend the name of another slice. Returns
/// `None` for other names.
fn pod_in_slice_name(component: &str) -> Option<&str> {
    let (of, pod) = component.strip_suffix(".slice")?.rsplit_once("-pod")?;
    let of = of.strip_suffix("-burstable").or_else(|| of.strip_suffix("-besteffort")).unwrap_or(of);
    (of == "kubepods" || of.ends_with("-kubepods")).then_some(pod)
}

/// Parses a pod's UID. In systemd's names, a UID has underscores instead of dashes.
fn parse_pod_uid(text: &str) -> Option<String> {
    let uid = text.replace('_', "-");
    let hexadecimal = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let groups: Vec<&str> = uid.split('-').collect();
    let lengths: Vec<usize> = groups.iter().map(|group| group.len()).collect();
    let fits = matches!(lengths.as_slice(), [8, 4, 4, 4, 12] | [32]);
    (fits && groups.into_iter().all(hexadecimal)).then_some(uid)
}

/// Parses a container's id from the name of its cgroup, such as `<id>`,
/// `cri-containerd-<id>.scope`, `crio-<id>.scope` or `docker-<id>.scope`.
fn parse_container_id(component: &str) -> Option<String> {
    let name = component.strip_suffix(".scope").unwrap_or(component);
    let (runtime, id) = name.rsplit_once('-').unwrap_or(("", name));
    let of_container = matches!(runtime, "" | "cri-containerd" | "crio" | "docker" | "libpod");
    let is_id = (12..=64).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    (of_container && is_id).then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const POD_UID: &str = "6f1d2c3b-4a59-4e68-8f77-0123456789ab";
    const POD_UID_IN_SYSTEMD_FORM: &str = "6f1d2c3b_4a59_4e68_8f77_0123456789ab";
    const OTHER_POD_UID: &str = "00000000-1111-4222-8333-444444444444";
    const CONTAINER_ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[expect(clippy::unnecessary_wraps, reason = "compared with the result of `parse_owner`")]
    fn owner_with_container(container: Option<&str>) -> Option<ProcessOwner> {
        Some(ProcessOwner { pod: POD_UID.into(), container: container.map(str::to_owned) })
    }

    #[test]
    fn the_names_of_all_cgroup_drivers_and_runtimes_are_parsed() {
        for path in [
            format!("/kubepods/besteffort/pod{POD_UID}/{CONTAINER_ID}"),
            format!("/kubepods/burstable/pod{POD_UID}/{CONTAINER_ID}"),
            format!("/kubepods/pod{POD_UID}/{CONTAINER_ID}"),
            format!(
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_UID_IN_SYSTEMD_FORM}.slice/cri-containerd-{CONTAINER_ID}.scope"
            ),
            format!(
                "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{POD_UID_IN_SYSTEMD_FORM}.slice/crio-{CONTAINER_ID}.scope"
            ),
            format!("/kubepods.slice/kubepods-pod{POD_UID_IN_SYSTEMD_FORM}.slice/docker-{CONTAINER_ID}.scope"),
            // CRI-O with the cgroupfs driver, and with a cgroup that the container created.
            format!("/kubepods/burstable/pod{POD_UID}/crio-{CONTAINER_ID}"),
            format!("/kubepods.slice/kubepods-pod{POD_UID_IN_SYSTEMD_FORM}.slice/crio-{CONTAINER_ID}.scope/container"),
            // containerd with the cgroupfs driver, and the kubelet with the systemd driver.
            format!(
                "/system.slice/containerd.service/kubepods-burstable-pod{POD_UID_IN_SYSTEMD_FORM}.slice:cri-containerd:{CONTAINER_ID}"
            ),
            // The kubelet runs in a container.
            format!("/kubelet/kubepods/burstable/pod{POD_UID}/{CONTAINER_ID}"),
            format!("/docker/{CONTAINER_ID}/kubelet/kubepods/besteffort/pod{POD_UID}/{CONTAINER_ID}"),
            format!(
                "/system.slice/docker-{CONTAINER_ID}.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{POD_UID_IN_SYSTEMD_FORM}.slice/cri-containerd-{CONTAINER_ID}.scope"
            ),
            format!("/cleave-e2e/node1/kubepods/besteffort/pod{POD_UID}/{CONTAINER_ID}"),
            // The path in another cgroup namespace.
            format!(
                "/../../../kubepods-burstable.slice/kubepods-burstable-pod{POD_UID_IN_SYSTEMD_FORM}.slice/cri-containerd-{CONTAINER_ID}.scope"
            ),
            format!("/../../pod{POD_UID}/{CONTAINER_ID}"),
            format!("/../../../besteffort/../pod{POD_UID}/{CONTAINER_ID}").replace("/besteffort/..", ""),
            format!("/kubepods/pod{POD_UID}/{CONTAINER_ID}/deep/below"),
            format!("/kubepods/pod{POD_UID}/{CONTAINER_ID} (deleted)"),
        ] {
            assert_eq!(parse_owner(&format!("0::{path}\n")), owner_with_container(Some(CONTAINER_ID)), "{path}");
            assert_eq!(
                parse_owner(&format!("7:cpu,cpuacct:{path}\n1:name=systemd:/\n0::/\n")),
                owner_with_container(Some(CONTAINER_ID)),
                "{path}"
            );
        }
    }

    #[test]
    fn processes_outside_of_containers_belong_to_the_pod_without_a_container() {
        for path in [
            format!("/kubepods/pod{POD_UID}"),
            format!("/kubepods/pod{POD_UID}/system.slice/x"),
            format!("/kubepods.slice/kubepods-pod{POD_UID_IN_SYSTEMD_FORM}.slice/crio-conmon-{CONTAINER_ID}.scope"),
            format!("/kubepods/pod{POD_UID}/../{CONTAINER_ID}x"),
        ] {
            assert_eq!(parse_owner(&format!("0::{path}")), owner_with_container(None), "{path}");
        }
    }

    #[test]
    fn processes_outside_of_pods_have_no_owner() {
        for text in [
            "",
            "0::/",
            "0::/user.slice/user-1000.slice/session-1.scope",
            "0::/machine.slice/libpod_pod_0123.slice",
            &format!("0::/system.slice/pod{POD_UID}/{CONTAINER_ID}"),
            &format!("0::/user.slice/kubepods-evil.slice/pod{POD_UID}"),
            &format!("0::/kubepods/pod{}", &POD_UID[1..]),
            "0::/kubepods/podx/y",
            "kubepods",
            "::",
            ":",
        ] {
            assert_eq!(parse_owner(text), None, "{text}");
        }
    }

    #[test]
    fn a_container_cannot_claim_another_pod_with_its_own_cgroups() {
        let lie = format!("kubepods/pod{OTHER_POD_UID}/{}", "f".repeat(64));
        for path in [
            format!("/kubepods/besteffort/pod{POD_UID}/{CONTAINER_ID}/{lie}"),
            format!(
                "/kubepods.slice/kubepods-pod{POD_UID_IN_SYSTEMD_FORM}.slice/cri-containerd-{CONTAINER_ID}.scope/{lie}"
            ),
            format!(
                "/kubepods/pod{POD_UID}/{CONTAINER_ID}/kubepods-burstable-pod{}.slice:cri-containerd:{}",
                OTHER_POD_UID.replace('-', "_"),
                "f".repeat(64)
            ),
            format!("/../../pod{POD_UID}/{CONTAINER_ID}/{lie}"),
        ] {
            assert_eq!(parse_owner(&format!("0::{path}")), owner_with_container(Some(CONTAINER_ID)), "{path}");
        }
        // If two hierarchies name different pods, the parser trusts neither hierarchy.
        assert_eq!(
            parse_owner(&format!(
                "2:cpu:/kubepods/pod{POD_UID}/{CONTAINER_ID}\n0::/kubepods/pod{OTHER_POD_UID}/{CONTAINER_ID}"
            )),
            None
        );
    }

    #[test]
    fn nested_pods_are_listed_outermost_first() {
        for path in [
            format!("0::/kubepods/burstable/pod{POD_UID}/3f0c"),
            format!("0::/kubepods/pod{POD_UID}"),
            format!("0::/../../besteffort/pod{POD_UID}/3f0c"),
            format!(
                "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_UID_IN_SYSTEMD_FORM}.slice/cri-containerd-3f.scope"
            ),
            format!(
                "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{POD_UID_IN_SYSTEMD_FORM}.slice/crio-3f.scope/container"
            ),
            format!("12:hugetlb:/\n5:cpu,cpuacct:/kubepods/burstable/pod{POD_UID}/3f0c\n0::/"),
            // A cgroup that a tenant creates below its own cgroup is not a pod.
            format!("0::/kubepods/pod{POD_UID}/3f0c/pod00000000-0000-0000-0000-000000000000"),
        ] {
            assert_eq!(parse_pod_uids(&path).first().map(String::as_str), Some(POD_UID), "{path}");
        }
        let hash = "0123456789abcdef0123456789abcdef";
        assert_eq!(parse_pod_uids(&format!("0::/kubepods/pod{hash}/a/pod{POD_UID}")), [hash, POD_UID]);
        for path in
            ["", "0::/", "0::/user.slice/a.service", "0::/kubepods/burstable", "0::/podman/pods", "0::/pod", "pod"]
        {
            assert!(parse_pod_uids(path).is_empty(), "{path}");
        }
    }

    proptest! {
        #[test]
        fn no_cgroup_text_causes_a_panic(text in ".*") {
            let _ = (parse_owner(&text), parse_pod_uids(&text));
        }

        #[test]
        fn cgroups_below_a_container_do_not_change_its_owner(below in "(/[^/\n]{1,20}){0,6}") {
            prop_assert_eq!(parse_owner(&format!("0::/kubepods/burstable/pod{POD_UID}/{CONTAINER_ID}{below}")).map(|owner| owner.pod), Some(POD_UID.to_owned()));
        }
    }
}
