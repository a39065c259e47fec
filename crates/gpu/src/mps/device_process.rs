//! The process of one device: supervises the device's daemon and serves its doors.
//!
//! The MPS host starts one such process for each device. A failure of the process affects only the
//! programs of its device. The process must not outlive the MPS host, because a later MPS host
//! would start a second process for the device.
use std::cell::Cell;
use std::io;
use std::os::fd::AsFd as _;
use std::rc::Rc;
use std::time::Duration;

use rustix::process::Signal;
use tokio::net::UnixStream;
use tokio::net::unix::OwnedWriteHalf;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::channel::{self, DeviceStatus, FromDevice, MessageReader, ToDevice};
use super::context::{HostContext, HostOptions};
use super::error::HostError;
use super::process::Children;
use super::reconciler::Reconciler;
use super::wire::{Desired, Paths};

/// Interval at which the process checks for removed door sockets and retries failed operations.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);
/// Time during which the process combines changes into one status.
const STATUS_DELAY: Duration = Duration::from_millis(5);

/// Supervises a device until SIGTERM or SIGINT, or until the MPS host closes the connection.
pub(crate) async fn run(
    device: String,
    parent: u32,
    paths: Paths,
    options: HostOptions,
    max_descriptors: usize,
) -> Result<(), HostError> {
    end_with_parent(parent)?;
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let (reader, writer) = connection_to_parent()?.into_split();
    let context = Rc::new(HostContext::new(paths, options, Children::start()?, max_descriptors));
    let (replies, queue) = mpsc::unbounded_channel();
    let process = Rc::new(DeviceProcess {
        device,
        reconciler: Reconciler::new(Rc::clone(&context)),
        context,
        cleaned_up: Cell::new(false),
        replies,
    });
    let mut sender = tokio::task::spawn_local(Rc::clone(&process).send_messages(writer, queue));
    let mut receiver = tokio::task::spawn_local(Rc::clone(&process).receive_messages(MessageReader::new(reader)));
    loop {
        tokio::select! {
            // Cancel-safe: signals remain queued, and tasks continue.
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            _ = &mut sender => break,
            _ = &mut receiver => break,
            () = sleep(MAINTENANCE_INTERVAL) => {
                process.reconciler.restore_sockets_and_drop_unused_devices();
                process.reconciler.retry_failed_doors();
            }
        }
    }
    process.reconciler.stop().await;
    Ok(())
}

/// Lets the kernel kill this process when the MPS host ends, even if this process hangs.
fn end_with_parent(parent: u32) -> Result<(), HostError> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).map_err(io::Error::from)?;
    let actual = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    if actual == Some(parent) { Ok(()) } else { Err(HostError::ParentExited(parent)) }
}

/// Returns the connection to the MPS host: the standard input.
fn connection_to_parent() -> io::Result<UnixStream> {
    let stream = std::os::unix::net::UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

struct DeviceProcess {
    device: String,
    context: Rc<HostContext>,
    reconciler: Reconciler,
    /// Whether nothing is left of an earlier process of the device.
    cleaned_up: Cell<bool>,
    replies: mpsc::UnboundedSender<FromDevice>,
}

impl DeviceProcess {
    /// Handles the messages of the MPS host. Returns when the connection ends.
    async fn receive_messages(self: Rc<Self>, mut reader: MessageReader) {
        let mut clean_up: Option<JoinHandle<()>> = None;
        let mut latest: Option<Desired> = None;
        loop {
            let message = tokio::select! {
                // Cancel-safe: the reader keeps partial lines, and the task continues.
                message = reader.receive() => message,
                () = wait_for_task(clean_up.as_mut()) => {
                    clean_up = None;
                    self.cleaned_up.set(true);
                    if let Some(desired) = latest.take() {
                        self.reconciler.apply_desired(desired);
                    }
                    self.context.notify_status_change();
                    continue;
                }
            };
            match message {
                Ok(Some(ToDevice::Ping)) => drop(self.replies.send(FromDevice::Pong)),
                Ok(Some(ToDevice::Request(number, request))) => {
                    let process = Rc::clone(&self);
                    tokio::task::spawn_local(async move {
                        let reply = process.reconciler.answer_request(request).await;
                        let _ = process.replies.send(FromDevice::Reply(number, reply));
                    });
                }
                Ok(Some(ToDevice::Desired(desired))) => {
                    // A new daemon first ends what is left of an earlier daemon. Without a new
                    // daemon, clean up before anything else starts on the device.
                    let is_first = !self.cleaned_up.get() && clean_up.is_none();
                    if is_first && !desired.daemons.contains_key(&self.device) {
                        let process = Rc::clone(&self);
                        clean_up = Some(tokio::task::spawn_local(async move {
                            process.reconciler.clean_up(&process.device).await;
                        }));
                    }
                    if clean_up.is_some() {
                        latest = Some(desired);
                    } else {
                        self.cleaned_up.set(true);
                        self.reconciler.apply_desired(desired);
                        self.context.notify_status_change();
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    tracing::error!(device = self.device, %error, "failed to read a message of the MPS host");
                    return;
                }
            }
        }
    }

    /// Sends the status whenever it changes, and the queued replies. Returns when the connection
    /// ends.
    async fn send_messages(
        self: Rc<Self>,
        mut writer: OwnedWriteHalf,
        mut replies: mpsc::UnboundedReceiver<FromDevice>,
    ) {
        let mut changes = self.context.subscribe_to_status_changes();
        changes.mark_unchanged();
        let mut sent: Option<DeviceStatus> = None;
        loop {
            let message = tokio::select! {
                // Cancel-safe: replies and changes remain queued.
                reply = replies.recv() => match reply {
                    Some(reply) => reply,
                    None => return,
                },
                changed = changes.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    sleep(STATUS_DELAY).await;
                    changes.mark_unchanged();
                    let status =
                        DeviceStatus { host: self.reconciler.status(), cleaned_up: self.cleaned_up.get() };
                    if sent.as_ref() == Some(&status) {
                        continue;
                    }
                    sent = Some(status.clone());
                    FromDevice::Status(status)
                }
            };
            if let Err(error) = channel::send(&mut writer, &message).await {
                tracing::debug!(device = self.device, %error, "the MPS host has closed the connection");
                return;
            }
        }
    }
}

/// Waits until the task has ended. Waits forever without a task.
async fn wait_for_task(task: Option<&mut JoinHandle<()>>) {
    match task {
        Some(task) => drop(task.await),
        None => std::future::pending().await,
    }
}
