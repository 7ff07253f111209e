//! An unbounded channel that is read from a thread or from any async runtime. Not for more than one reader.

use std::{
    collections::VecDeque,
    future::poll_fn,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

#[derive(Debug)]
struct Shared<T> {
    queue: VecDeque<T>,
    senders: usize,
    reader_gone: bool,
    waker: Option<Waker>,
}

#[derive(Debug)]
struct Core<T> {
    shared: Mutex<Shared<T>>,
    filled: Condvar,
}

impl<T> Core<T> {
    fn lock(&self) -> MutexGuard<'_, Shared<T>> {
        // No code that can panic runs under the lock, so a poisoned one still holds a consistent queue.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The writing end; clones write to the same reader.
#[derive(Debug)]
pub(crate) struct Sender<T>(Arc<Core<T>>);

/// The reading end.
#[derive(Debug)]
pub(crate) struct Receiver<T>(Arc<Core<T>>);

/// A fresh channel.
pub(crate) fn mailbox<T>() -> (Sender<T>, Receiver<T>) {
    let shared = Mutex::new(Shared { queue: VecDeque::new(), senders: 1, reader_gone: false, waker: None });
    let core = Arc::new(Core { shared, filled: Condvar::new() });
    (Sender(Arc::clone(&core)), Receiver(core))
}

impl<T> Sender<T> {
    /// Adds a message; false when nobody reads any more.
    pub(crate) fn send(&self, message: T) -> bool {
        let mut shared = self.0.lock();
        if shared.reader_gone {
            return false;
        }
        shared.queue.push_back(message);
        let waker = shared.waker.take();
        drop(shared);
        self.0.filled.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }

    /// True when nobody reads any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.0.lock().reader_gone
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.0.lock().senders += 1;
        Self(Arc::clone(&self.0))
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let mut shared = self.0.lock();
        shared.senders -= 1;
        let waker = if shared.senders == 0 { shared.waker.take() } else { None };
        drop(shared);
        self.0.filled.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Receiver<T> {
    /// Blocks until there is a message; `None` when the queue is empty and no sender is left.
    pub(crate) fn recv(&mut self) -> Option<T> {
        let mut shared = self.0.lock();
        loop {
            if let Some(message) = shared.queue.pop_front() {
                return Some(message);
            }
            if shared.senders == 0 {
                return None;
            }
            shared = self.0.filled.wait(shared).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The next message, if there is one.
    pub(crate) fn try_recv(&mut self) -> Option<T> {
        self.0.lock().queue.pop_front()
    }

    /// As [`Receiver::recv`], for a task.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<T>> {
        let mut shared = self.0.lock();
        if let Some(message) = shared.queue.pop_front() {
            return Poll::Ready(Some(message));
        }
        if shared.senders == 0 {
            return Poll::Ready(None);
        }
        shared.waker = Some(context.waker().clone());
        Poll::Pending
    }

    /// As [`Receiver::recv`], for a task.
    pub(crate) async fn next(&mut self) -> Option<T> {
        poll_fn(|context| self.poll(context)).await
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let mut shared = self.0.lock();
        shared.reader_gone = true;
        let queue = std::mem::take(&mut shared.queue);
        drop(shared);
        drop(queue);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::atomic::AtomicBool, sync::atomic::Ordering, task::Wake, thread};

    #[test]
    fn messages_come_in_order_and_end_with_the_last_sender() {
        let (sender, mut receiver) = mailbox();
        let other = sender.clone();
        let writer = thread::spawn(move || (0..100).for_each(|i| assert!(sender.send(i))));
        let seen: Vec<i32> = (0..100).map(|_| receiver.recv().unwrap()).collect();
        writer.join().unwrap();
        assert_eq!(seen, (0..100).collect::<Vec<_>>());
        assert_eq!(receiver.try_recv(), None);
        drop(other);
        assert_eq!(receiver.recv(), None);
    }

    #[test]
    fn a_sender_learns_that_the_reader_left() {
        let (sender, receiver) = mailbox();
        assert!(sender.send(1));
        drop(receiver);
        assert!(sender.is_closed());
        assert!(!sender.send(2));
    }

    #[test]
    fn a_waiting_task_is_woken_by_a_message_and_by_the_end() {
        struct Flag(AtomicBool);
        impl Wake for Flag {
            fn wake(self: Arc<Self>) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let flag = Arc::new(Flag(AtomicBool::new(false)));
        let waker = Waker::from(Arc::clone(&flag));
        let mut context = Context::from_waker(&waker);
        let (sender, mut receiver) = mailbox();
        assert!(receiver.poll(&mut context).is_pending());
        sender.send(7);
        assert!(flag.0.swap(false, Ordering::SeqCst));
        assert_eq!(receiver.poll(&mut context), Poll::Ready(Some(7)));
        assert!(receiver.poll(&mut context).is_pending());
        drop(sender);
        assert!(flag.0.load(Ordering::SeqCst));
        assert_eq!(receiver.poll(&mut context), Poll::Ready(None));
    }
}
