//! The C interface of NIXL 1.5, and an agent of it. Unsafe code lives here only.
//!
//! What it was written from: the names and arguments that `libnixl_capi.so` 1.5.1 exports. Handles are opaque, statuses are
//! 0 (done), 1 (under way) and below 0 (failed).

#![allow(unsafe_code)]

use std::{
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    os::unix::ffi::OsStrExt,
    path::Path,
    ptr::null_mut,
    sync::Arc,
};

use kvferry_arena::Buffer;
use kvferry_transport::slots::{BlockSpan, EngineError};

use crate::library::missing;

type Handle = *mut c_void;

/// How an agent is made.
#[repr(C)]
struct Config {
    progress_thread: bool,
    listen_thread: bool,
    listen_port: c_int,
    /// 0: only one thread uses the agent at a time.
    thread_sync: c_int,
    workers: c_uint,
    /// Between two looks of the progress thread, which sleeps and is woken by what comes. 0 would have it spin.
    progress_delay_us: u64,
    listen_delay_us: u64,
    telemetry: bool,
}

const HOST_MEMORY: c_int = 0;
const WRITE: c_int = 1;

macro_rules! api {
    ($($name:ident($($argument:ty),*);)*) => {
        /// The functions of the library, which stays loaded.
        pub(crate) struct Api {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Api {
            /// Finds every function in a loaded library.
            ///
            /// # Safety
            /// The library's functions of these names take these arguments.
            unsafe fn of(library: *mut c_void) -> Result<Self, &'static str> {
                $(let $name = {
                    let name = concat!("nixl_capi_", stringify!($name));
                    let symbol = symbol(library, name).ok_or(name)?;
                    // SAFETY: the caller's promise; data and function pointers are alike on this platform.
                    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(symbol) }
                };)*
                Ok(Self { $($name),* })
            }
        }
    };
}

api! {
    create_configured_agent(*const c_char, *const Config, *mut Handle);
    destroy_agent(Handle);
    create_params(*mut Handle);
    params_add(Handle, *const c_char, *const c_char);
    destroy_params(Handle);
    create_backend(Handle, *const c_char, Handle, *mut Handle);
    destroy_backend(Handle);
    get_local_md(Handle, *mut *mut c_void, *mut usize);
    load_remote_md(Handle, *const c_void, usize, *mut *mut c_char);
    invalidate_remote_md(Handle, *const c_char);
    create_reg_dlist(c_int, *mut Handle);
    destroy_reg_dlist(Handle);
    reg_dlist_add_desc(Handle, usize, usize, u64, *const c_void, usize);
    register_mem(Handle, Handle, Handle);
    create_xfer_dlist(c_int, *mut Handle);
    destroy_xfer_dlist(Handle);
    xfer_dlist_add_desc(Handle, usize, usize, u64);
    create_xfer_req(Handle, c_int, Handle, Handle, *const c_char, *mut Handle, Handle);
    post_xfer_req(Handle, Handle, Handle);
    get_xfer_status(Handle, Handle);
    release_xfer_req(Handle, Handle);
    destroy_xfer_req(Handle);
    gen_notif(Handle, *const c_char, *const c_void, usize, Handle);
    create_notif_map(*mut Handle);
    destroy_notif_map(Handle);
    get_notifs(Handle, Handle, Handle);
    notif_map_size(Handle, *mut usize);
    notif_map_get_agent_at(Handle, usize, *mut *const c_char);
    notif_map_get_notifs_size(Handle, *const c_char, *mut usize);
    notif_map_get_notif(Handle, *const c_char, usize, *mut *const c_void, *mut usize);
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Api")
    }
}

fn symbol(library: *mut c_void, name: &str) -> Option<*mut c_void> {
    let name = CString::new(name).ok()?;
    // SAFETY: `library` is a handle of `dlopen` that is never closed, and the name ends with a zero.
    let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!symbol.is_null()).then_some(symbol)
}

impl Api {
    /// Loads the library at `path`, for the rest of the process: its threads may not lose their code.
    pub(crate) fn load(path: &Path) -> Result<Self, EngineError> {
        let shown = path.display();
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| missing(format!("`{shown}` is no path")))?;
        // SAFETY: the library's initialisers run, which is what loading it means; the name ends with a zero.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            // SAFETY: after a failure this is a string of the loader, which is copied at once.
            let why = unsafe { libc::dlerror() };
            // SAFETY: not null: it ends with a zero.
            let why = (!why.is_null()).then(|| unsafe { CStr::from_ptr(why) }.to_string_lossy().into_owned());
            return Err(missing(why.unwrap_or_else(|| format!("the loader refuses `{shown}`"))));
        }
        // Later versions give memory back by a function of their own, and their structures differ.
        if symbol(library, "nixl_capi_mem_free").is_some() {
            return Err(missing(format!("`{shown}` is of a later version than 1.5")));
        }
        skip_destructors();
        // SAFETY: these are the functions of version 1.5, the only one with all of the names and without the one above.
        unsafe { Self::of(library) }
            .map_err(|name| missing(format!("`{shown}` has no function `{name}`: it is not of version 1.5")))
    }
}

unsafe extern "C" {
    /// Of the C library that the package is built for.
    fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// From now on the process ends without the destructors of libraries. The package brings a libnl of its own; where the
/// system's RDMA libraries are installed too, theirs is loaded as well, and at the end a destructor of one finds the lists of
/// the other: SIGSEGV, after all is done (as with the Python package).
fn skip_destructors() {
    extern "C" fn end(status: c_int, _: *mut c_void) {
        // SAFETY: flushes what the C library still has to write, and ends.
        unsafe {
            libc::fflush(null_mut());
            libc::_exit(status);
        }
    }
    // SAFETY: `end` stays for as long as the process. Should it not be taken, a process ends as it would have.
    unsafe { on_exit(end, null_mut()) };
}

/// What a status below 0 means.
fn refused(action: &'static str, status: c_int) -> EngineError {
    let what = match status {
        -1 => "it takes an argument for wrong",
        -2 => "its backend refuses, or the peer is gone",
        -3 => "not in this state",
        -4 => "an exception",
        -6 => "it knows no such peer",
        _ => "an unknown status",
    };
    let reason = format!("{what} (status {status}; NIXL_LOG_LEVEL=DEBUG says more)");
    EngineError::Failed { engine: "NIXL", action, reason }
}

fn check(action: &'static str, status: c_int) -> Result<(), EngineError> {
    if status == 0 { Ok(()) } else { Err(refused(action, status)) }
}

fn text(text: &str) -> Result<CString, EngineError> {
    CString::new(text).map_err(|_| refused("take a name with a zero in it", -1))
}

/// A write that was posted.
#[derive(Debug)]
pub(crate) struct Request(Handle);

// SAFETY: as for `Agent`: it is used with its agent only.
unsafe impl Send for Request {}

/// An agent with its backend, and the memory that it knows. Used by one thread at a time.
#[derive(Debug)]
pub(crate) struct Agent {
    api: Arc<Api>,
    agent: Handle,
    backend: Handle,
    /// Outlives the agent.
    memory: Vec<Arc<Buffer>>,
}

// SAFETY: the agent has no thread affinity; whoever owns this value is the only one that uses it.
unsafe impl Send for Agent {}

impl Agent {
    /// UCX is set up with `settings`, on top of its environment.
    pub(crate) fn new(api: Arc<Api>, name: &str, settings: Option<&str>) -> Result<Self, EngineError> {
        let (name, settings) = (text(name)?, settings.map(text).transpose()?);
        let config = Config {
            progress_thread: true,
            listen_thread: false,
            listen_port: 0,
            thread_sync: 0,
            workers: 1,
            progress_delay_us: 10_000,
            listen_delay_us: 0,
            telemetry: false,
        };
        let (mut agent, mut params, mut backend) = (null_mut(), null_mut(), null_mut());
        // SAFETY: strings end with a zero, and all places for results are valid. What was made before a failure is
        // given back.
        unsafe {
            check(
                "make an agent",
                (api.create_configured_agent)(name.as_ptr(), &raw const config, &raw mut agent),
            )?;
            let mut made = (api.create_params)(&raw mut params);
            if made == 0 {
                if let Some(settings) = &settings {
                    made = (api.params_add)(params, c"engine_config".as_ptr(), settings.as_ptr());
                }
                if made == 0 {
                    made = (api.create_backend)(agent, c"UCX".as_ptr(), params, &raw mut backend);
                }
                (api.destroy_params)(params);
            }
            if made != 0 {
                (api.destroy_agent)(agent);
                check("start its UCX backend (UCX_TLS=tcp works everywhere)", made)?;
            }
        }
        Ok(Self { api, agent, backend, memory: Vec::new() })
    }

    /// Registers host memory and keeps it.
    pub(crate) fn register(&mut self, memory: Arc<Buffer>, span: BlockSpan) -> Result<(), EngineError> {
        let mut list = null_mut();
        let BlockSpan { address, len, device, .. } = span;
        let status = {
            // SAFETY: the memory is as long as `span` says, and `self.memory` keeps it for as long as there is an agent.
            unsafe {
                check("list memory", (self.api.create_reg_dlist)(HOST_MEMORY, &raw mut list))?;
                let added = (self.api.reg_dlist_add_desc)(
                    list,
                    address as usize,
                    len.index(),
                    device.0.into(),
                    c"".as_ptr().cast(),
                    0,
                );
                let status =
                    if added == 0 { (self.api.register_mem)(self.agent, list, null_mut()) } else { added };
                (self.api.destroy_reg_dlist)(list);
                status
            }
        };
        self.memory.push(memory);
        check("register memory", status)
    }

    pub(crate) fn metadata(&mut self) -> Result<Vec<u8>, EngineError> {
        let (mut data, mut len) = (null_mut(), 0);
        // SAFETY: on success `data` is memory of malloc with `len` bytes, which is copied and given back.
        unsafe {
            check("give its metadata", (self.api.get_local_md)(self.agent, &raw mut data, &raw mut len))?;
            let bytes = std::slice::from_raw_parts(data.cast::<u8>(), len).to_vec();
            libc::free(data);
            Ok(bytes)
        }
    }

    /// The name of the peer that the metadata is of.
    pub(crate) fn load(&mut self, metadata: &[u8]) -> Result<String, EngineError> {
        let mut name = null_mut();
        // SAFETY: `metadata` is valid for its length; on success `name` is a string of malloc, which is copied and given
        // back.
        unsafe {
            let (data, len) = (metadata.as_ptr().cast(), metadata.len());
            check(
                "take the peer's metadata",
                (self.api.load_remote_md)(self.agent, data, len, &raw mut name),
            )?;
            let copy = CStr::from_ptr(name).to_string_lossy().into_owned();
            libc::free(name.cast());
            Ok(copy)
        }
    }

    /// Forgets a peer.
    pub(crate) fn invalidate(&mut self, peer: &str) {
        if let Ok(peer) = text(peer) {
            // SAFETY: the name ends with a zero. A peer that is not known is an error, which nobody needs.
            let _ = unsafe { (self.api.invalidate_remote_md)(self.agent, peer.as_ptr()) };
        }
    }

    fn list(&self, spans: impl Iterator<Item = BlockSpan>) -> Result<Handle, EngineError> {
        let mut list = null_mut();
        // SAFETY: the place for the result is valid; the list copies what it is given. That the span may be read or written
        // is checked by the agent when a request is made of it, against what is registered.
        unsafe {
            check("list memory", (self.api.create_xfer_dlist)(HOST_MEMORY, &raw mut list))?;
            for span in spans {
                let (address, len) = (span.address as usize, span.len.index());
                let status = (self.api.xfer_dlist_add_desc)(list, address, len, span.device.0.into());
                if status != 0 {
                    (self.api.destroy_xfer_dlist)(list);
                }
                check("list memory", status)?;
            }
        }
        Ok(list)
    }

    /// Starts to write from the first of each pair, which is registered here, to the second, which is registered at `peer`.
    pub(crate) fn write(
        &mut self,
        peer: &str,
        pairs: &[(BlockSpan, BlockSpan)],
    ) -> Result<Request, EngineError> {
        let peer = text(peer)?;
        let from = self.list(pairs.iter().map(|(local, _)| *local))?;
        let to = self.list(pairs.iter().map(|(_, remote)| *remote));
        let mut request = null_mut();
        // SAFETY: the lists are valid until they are destroyed, the request copies them. It reads registered memory only,
        // which `self.memory` keeps.
        let made = unsafe {
            let made = match to {
                Ok(to) => {
                    let none = null_mut();
                    let made = (self.api.create_xfer_req)(
                        self.agent,
                        WRITE,
                        from,
                        to,
                        peer.as_ptr(),
                        &raw mut request,
                        none,
                    );
                    (self.api.destroy_xfer_dlist)(to);
                    check("prepare a write", made)
                }
                Err(error) => Err(error),
            };
            (self.api.destroy_xfer_dlist)(from);
            made
        };
        made?;
        let request = Request(request);
        // SAFETY: the request was made above.
        let posted = unsafe { (self.api.post_xfer_req)(self.agent, request.0, null_mut()) };
        if posted < 0 {
            self.release(request);
            return Err(refused("write", posted));
        }
        Ok(request)
    }

    /// True once a write has settled.
    pub(crate) fn settled(&mut self, request: &Request) -> Result<bool, EngineError> {
        // SAFETY: a request is only released by its owner, afterwards.
        match unsafe { (self.api.get_xfer_status)(self.agent, request.0) } {
            0 => Ok(true),
            1 => Ok(false),
            status => Err(refused("finish a write", status)),
        }
    }

    /// Gives a request back. One that is under way goes on.
    #[allow(clippy::needless_pass_by_value, reason = "it is not there any more")]
    pub(crate) fn release(&mut self, request: Request) {
        // SAFETY: the request was made by this agent and is not used any more. One that cannot be released is left.
        unsafe {
            if (self.api.release_xfer_req)(self.agent, request.0) == 0 {
                (self.api.destroy_xfer_req)(request.0);
            }
        }
    }

    pub(crate) fn notify(&mut self, peer: &str, message: &[u8]) -> Result<(), EngineError> {
        let peer = text(peer)?;
        let (data, len) = (message.as_ptr().cast(), message.len());
        // SAFETY: `message` is valid for its length and is copied.
        let status = unsafe { (self.api.gen_notif)(self.agent, peer.as_ptr(), data, len, null_mut()) };
        check("send a notification", status)
    }

    /// What has come: names of agents and messages.
    pub(crate) fn notifications(&mut self) -> Result<Vec<Vec<u8>>, EngineError> {
        let mut map = null_mut();
        let mut messages = Vec::new();
        // SAFETY: places for results are valid; names and messages belong to the map, which is destroyed after they were
        // copied and is changed by nobody meanwhile.
        unsafe {
            check("make a list of notifications", (self.api.create_notif_map)(&raw mut map))?;
            let got = (self.api.get_notifs)(self.agent, map, null_mut());
            let mut agents = 0;
            if got == 0 && (self.api.notif_map_size)(map, &raw mut agents) == 0 {
                for index in 0..agents {
                    let (mut name, mut count) = (std::ptr::null(), 0);
                    if (self.api.notif_map_get_agent_at)(map, index, &raw mut name) != 0
                        || (self.api.notif_map_get_notifs_size)(map, name, &raw mut count) != 0
                    {
                        continue;
                    }
                    for number in 0..count {
                        let (mut data, mut len) = (std::ptr::null(), 0);
                        let found =
                            (self.api.notif_map_get_notif)(map, name, number, &raw mut data, &raw mut len);
                        if found == 0 && !data.is_null() {
                            messages.push(std::slice::from_raw_parts(data.cast::<u8>(), len).to_vec());
                        }
                    }
                }
            }
            (self.api.destroy_notif_map)(map);
            check("hear notifications", got)?;
        }
        Ok(messages)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // SAFETY: both were made by `new` and are not used any more. Memory goes after the agent.
        unsafe {
            (self.api.destroy_agent)(self.agent);
            (self.api.destroy_backend)(self.backend);
        }
    }
}
